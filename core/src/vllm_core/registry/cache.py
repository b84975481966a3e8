"""The cache folder of this user, and small files written so that a reader never sees half of one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path


def cache_folder(environ: Mapping[str, str]) -> Path:
    """`VLLM_CORE_CACHE`, else ``vllm-core`` in the user's cache folder."""
    own = environ.get("VLLM_CORE_CACHE")
    if own:
        return Path(own)
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-core"


def write_atomic(path: Path, data: bytes) -> None:
    """Write ``data`` under another name, then rename. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except OSError:
        os.unlink(name)
        raise
