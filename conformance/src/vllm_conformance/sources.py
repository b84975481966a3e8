"""Which code was tested: versions, the commit and whether the tree is dirty, and a digest of the files that were imported."""

from __future__ import annotations

import base64
import csv
import hashlib
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import msgspec

GIT_TIMEOUT_S = 30.0
MAX_SIMULATED_CHARS = 200
_SUFFIXES = (".py", ".so", ".toml", ".json", ".txt", ".cu", ".cpp", ".h")


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Where a package's code comes from.

    `kind`: ``git``, a checkout at `commit`; ``wheel``, installed, with hashes of its files; ``files``, neither, so that nobody
    else can have the same. `dirty`: a tracked file of the package has changes, an untracked one lies in it, or an installed
    one is not as its wheel had it. `digest`: SHA-256 over names and contents of the package's files.
    """

    name: str
    version: str
    kind: Literal["git", "wheel", "files"]
    commit: str
    dirty: bool
    digest: str


def source_of(name: str, module: str) -> Source:
    """The source of an installed distribution, whose top package is that of ``module``. Imports nothing."""
    try:
        version = distribution(name).version
    except PackageNotFoundError:
        version = "unknown"
    root = _root(module)
    files = sorted(_files(root))
    commit = _git(root, "rev-parse", "HEAD")
    if (
        commit is not None
        and _git(root, "ls-files", "--error-unmatch", *(path.name for path in _top(root, files)[:1])) is not None
    ):
        dirty = bool(_git(root, "status", "--porcelain", "--", *([root.name] if root.is_file() else ["."])))
        return Source(name=name, version=version, kind="git", commit=commit, dirty=dirty, digest=_digest(root, files))
    changed = _changed_since_installed(name, root)
    kind: Literal["wheel", "files"] = "files" if changed is None else "wheel"
    return Source(name=name, version=version, kind=kind, commit="", dirty=bool(changed), digest=_digest(root, files))


def _root(module: str) -> Path:
    """Folder of the top package, or the file of a module that is none."""
    spec = find_spec(module.partition(".")[0])
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"no module {module!r}")
    path = Path(spec.origin)
    return path.parent if spec.submodule_search_locations else path


def _files(root: Path) -> Iterable[Path]:
    if root.is_file():
        return [root]
    return (path for path in root.rglob("*") if path.suffix in _SUFFIXES and "__pycache__" not in path.parts and path.is_file())


def _top(root: Path, files: list[Path]) -> list[Path]:
    return [path for path in files if path.parent == (root if root.is_dir() else root.parent)]


def _digest(root: Path, files: Iterable[Path]) -> str:
    base = root if root.is_dir() else root.parent
    total = hashlib.sha256()
    for path in files:
        total.update(f"{path.relative_to(base).as_posix()}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()


def _git(root: Path, *arguments: str) -> str | None:
    """What git prints, or None where there is no git, no work tree, or it says no."""
    folder = root if root.is_dir() else root.parent
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _changed_since_installed(name: str, root: Path) -> bool | None:
    """Whether a file below ``root`` differs from its hash in the wheel's RECORD; None where none is recorded."""
    try:
        installed = distribution(name)
    except PackageNotFoundError:
        return None
    base, below = Path(str(installed.locate_file(""))), root.resolve()
    rows = [row for row in csv.reader((installed.read_text("RECORD") or "").splitlines()) if len(row) == 3 and row[1]]
    inside = [(base / path, recorded) for path, recorded, _ in rows if (base / path).resolve().is_relative_to(below)]
    return any(not _is_as_recorded(path, recorded) for path, recorded in inside) if inside else None


def _is_as_recorded(path: Path, recorded: str) -> bool:
    if not path.is_file():
        return False
    kind, _, value = recorded.partition("=")
    return base64.urlsafe_b64encode(hashlib.new(kind, path.read_bytes()).digest()).rstrip(b"=").decode("ascii") == value


SIMULATED = "SIMULATED_HARDWARE"
"""Variable in which a simulator says to every process what it stands for; the plugin under test has no part in it."""


def host(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Facts of this machine that matter and identify nobody; `simulated` where a simulator stands for the hardware."""
    facts = {"system": platform.system(), "release": platform.release(), "machine": platform.machine()}
    simulated = environ.get(SIMULATED, "")
    return {**facts, "simulated": simulated[:MAX_SIMULATED_CHARS]} if simulated else facts
