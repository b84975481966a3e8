"""What the installed torch was built for, without importing it where its files say so: importing takes seconds."""

from __future__ import annotations

import importlib.util
import re
from importlib import metadata
from pathlib import Path


def torch_build(name: str) -> tuple[str, str | None] | None:
    """Version of the installed torch, and what its ``version.py`` has for ``name``, such as ``hip``; None without torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(next(iter(spec.submodule_search_locations))) / "version.py"
    text = path.read_text("utf-8") if path.is_file() else ""
    version = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)", text, re.MULTILINE)
    value = re.search(rf"^{name}\b[^=]*=\s*['\"]([^'\"]+)", text, re.MULTILINE)
    return version[1] if version else "unknown version", value[1] if value else None


def torch_is_extended() -> bool:
    """Whether something installed extends torch on import (entry points ``torch.backends``): its files say less then."""
    return bool(metadata.entry_points(group="torch.backends"))
