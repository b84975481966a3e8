"""Native code is compiled once: variables that send CMake's compiler through ccache, where that is installed.

The environment of a checkout and the wheel that is made from its sdist compile the same sources. The standard library alone.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

LAUNCHER = "CMAKE_CXX_COMPILER_LAUNCHER"


def variables(scripts: Path) -> dict[str, str]:
    """For the environment of a build; ``scripts`` is where an environment keeps its commands.

    Nothing where there is no ccache, or where somebody has chosen another launcher.
    """
    found = shutil.which("ccache", path=str(scripts)) or shutil.which("ccache")
    if found is None or LAUNCHER in os.environ:
        return {}
    # Paths count relative to the build folder: it lies at the same place in a checkout and in an unpacked sdist.
    return {LAUNCHER: found, "CCACHE_BASEDIR": "/", "CCACHE_NOHASHDIR": "1"}
