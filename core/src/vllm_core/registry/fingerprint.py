"""What a look at this machine depends on, as a digest: the plugin's files, what is installed, the drivers, this boot.

Nothing of the plugin is imported for it.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

import msgspec

from vllm_core.registry.discover import Found
from vllm_core.version import __version__

MAX_FILES = 5000
_CODE = (".py", ".so", ".pyd", ".toml")


def machine(root: Path = Path("/")) -> str:
    """What is the same for every plugin: what is installed, the drivers, this boot. A look at many files: take it once."""
    return ";".join((installed(), drivers(root), _boot_id(root), platform.node(), sys.executable, __version__))


def digest(found: Found, environ: Mapping[str, str], *more: str, here: str | None = None) -> str:
    """Digest of all that can change what ``found`` does when it is imported and probed; ``here`` is `machine` as of now."""
    parts = [
        found.key,
        found.version,
        found.value,
        str(newest_change(found)),
        machine() if here is None else here,
        environ.get("LD_LIBRARY_PATH", ""),
        *more,
    ]
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:32]


def newest_change(found: Found) -> int:
    """Newest modification time in ns among the files of the plugin's top package: an editable install keeps its version."""
    try:
        spec = find_spec(found.value.partition(":")[0].partition(".")[0])
    except (ImportError, ValueError):
        return 0  # its import says why
    if spec is None:
        return 0
    if spec.submodule_search_locations is None:
        return _changed(Path(spec.origin)) if spec.origin is not None else 0
    newest = 0
    for count, path in enumerate(_files(spec.submodule_search_locations)):
        if count == MAX_FILES:
            break
        newest = max(newest, _changed(path))
    return newest


def installed(path: Iterable[str] | None = None) -> str:
    """When something was last installed into, or removed from, each folder that modules are found in."""
    return ";".join(f"{place}={_changed(Path(place))}" for place in (sys.path if path is None else path) if place)


def _files(folders: list[str]) -> Iterator[Path]:
    for folder in folders:
        for place, inside, names in os.walk(folder):
            inside.sort()
            yield from (Path(place, name) for name in names if name.endswith(_CODE))


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0  # removed meanwhile


def drivers(root: Path = Path("/")) -> str:
    """Versions of the loaded kernel modules, and when the list of shared libraries last changed: a driver's two halves."""
    modules = [f"{path.parent.name}={_read(path)}" for path in sorted((root / "sys/module").glob("*/version"))]
    return f"{';'.join(modules)};libraries={_changed(root / 'etc/ld.so.cache')}"


def _boot_id(root: Path) -> str:
    return _read(root / "proc/sys/kernel/random/boot_id") or "unknown boot"


def _read(path: Path) -> str:
    try:
        return path.read_text("ascii", "replace").strip()
    except OSError:
        return ""
