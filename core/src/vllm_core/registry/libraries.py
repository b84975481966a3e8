"""Native libraries of a plugin: does each load, and if not, which dependency is missing and where was it looked for?

Each is opened in a child process, so that a crashing initialiser is one line and nothing stays loaded here. The paths
tried come from glibc's own trace (`LD_DEBUG=libs`); other C libraries give the error alone.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from vllm_core.api.manifest import Check
from vllm_core.registry.probe import child_environment

TIMEOUT_S = 30.0
MAX_LIBRARIES = 200
MAX_PATHS = 100

# Extensions of torch link to its libraries without a path: they load only in a process that has torch.
_OPEN = """
import ctypes, sys
try:
    ctypes.CDLL(sys.argv[1])
except OSError:
    import torch
    ctypes.CDLL(sys.argv[1])
"""
_SUFFIX = re.compile(r"\.(so|dylib|dll|pyd)(\.[0-9.]+)?$")
_MISSING = re.compile(r"OSError: (?P<name>[^:\s]+): (?P<why>.*)")


def native_libraries(folder: Path) -> list[Path]:
    """The native libraries below a plugin's package folder."""
    return sorted(path for path in folder.rglob("*") if _SUFFIX.search(path.name) and path.is_file())[:MAX_LIBRARIES]


def check_library(path: Path, environ: Mapping[str, str]) -> Check:
    """Open one library in a child process."""
    if not path.is_file():
        return Check(name=str(path), outcome="failed", detail="no such file", hint="correct the path")
    try:
        done = subprocess.run(
            [sys.executable, "-c", _OPEN, str(path)],
            env={**child_environment(environ), "LD_DEBUG": "libs"},
            cwd=os.sep,
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Check(name=str(path), outcome="failed", detail=f"did not load within {TIMEOUT_S:g} s")
    if done.returncode == 0:
        return Check(name=str(path), outcome="ok", detail="loads, with all its dependencies")
    text = done.stderr.decode("utf-8", "replace")
    if done.returncode < 0:
        return Check(name=str(path), outcome="failed", detail=f"loading it ended the process with signal {-done.returncode}")
    found = _MISSING.findall(text)
    name, why = found[0] if found else (path.name, text.strip().splitlines()[-1])
    tried = paths_tried(text, name)
    where = f"; tried {', '.join(tried[:MAX_PATHS])}" if tried else ""
    hint = f"install the package that has {name}, or add its folder to LD_LIBRARY_PATH"
    return Check(name=str(path), outcome="failed", detail=f"{name}: {why}{where}", hint=hint)


def paths_tried(trace: str, library: str) -> list[str]:
    """Every file that the loader tried for ``library``, from its trace."""
    lines = (line.partition("trying file=")[2].strip() for line in trace.splitlines())
    return list(dict.fromkeys(line for line in lines if line.endswith(f"/{library}")))
