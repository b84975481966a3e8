"""What is checked: a project folder, a wheel, or an installed distribution, made alike.

A folder is not built: its ``pyproject.toml`` becomes the metadata that an editable install would have. A wheel is unpacked.
Both lie in a temporary folder that child processes search first, so that what is installed of the same name is not taken.
"""

from __future__ import annotations

import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any

import importlib_metadata

from vllm_core.api import ENTRY_POINT_GROUP
from vllm_core.errors import ConfigError, UnknownPlatformError, nearest
from vllm_core.registry.discover import Found, find

MAX_UNPACKED_BYTES = 4 << 30
MAX_FILES = 50_000
MAX_PROJECT_BYTES = 1 << 20
UNKNOWN_VERSION = "0"

tomllib: Any = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One distribution under check. `search` are folders that a child process looks into first; `files` a wheel's content."""

    origin: str
    distribution: str
    version: str
    entries: tuple[Found, ...]
    requires: tuple[str, ...]
    requires_python: str
    search: tuple[Path, ...] = ()
    packages: Mapping[str, Path] = field(default_factory=dict)
    files: tuple[str, ...] | None = None

    def sources(self) -> Iterator[Path]:
        """Every Python file of its packages."""
        for folder in self.packages.values():
            yield from sorted(folder.rglob("*.py")) if folder.is_dir() else [folder]

    def shown(self, path: Path) -> str:
        """A file as its author knows it: from the package's name on."""
        for folder in self.packages.values():
            if path.is_relative_to(folder.parent):
                return path.relative_to(folder.parent).as_posix()
        return str(path)

    def module_file(self, module: str) -> Path | None:
        """The file of one of its own modules, without importing; None where there is none."""
        top, *rest = module.split(".")
        if top not in self.packages:
            return None
        base = self.packages[top]
        if base.is_file():
            return base if not rest else None
        path = base.joinpath(*rest)
        found = [path.with_suffix(".py")] if rest else []
        return next((one for one in [path / "__init__.py", *found] if one.is_file()), None)

    def can_find(self, package: str) -> bool:
        """Whether a top package is there, its own or another distribution's; it is not imported."""
        own = any((folder / package).is_dir() or any(folder.glob(f"{package}.*")) for folder in self.search)
        return own or find_spec(package) is not None


@contextmanager
def open_subject(target: str) -> Iterator[tuple[Subject, ...]]:
    """The distributions that ``target`` means: a folder, a wheel, or a name of an installed one (empty: all).

    Raises ConfigError for a path that is neither, UnknownPlatformError for a name that nothing answers to.
    """
    path = Path(target)
    if target and path.is_dir():
        with tempfile.TemporaryDirectory(prefix="vllm-core-check-") as folder:
            yield (_from_project(path.resolve(), Path(folder)),)
    elif target.endswith(".whl"):
        with tempfile.TemporaryDirectory(prefix="vllm-core-check-") as folder:
            yield (_from_wheel(path, Path(folder)),)
    elif len(path.parts) > 1:
        raise _unusable(target, "neither a folder nor a .whl file")
    else:
        yield _installed(target)


def _from_project(project: Path, folder: Path) -> Subject:
    table = _read_project(project / "pyproject.toml")
    name, version = table["name"], str(table.get("version", UNKNOWN_VERSION))
    points = table.get("entry-points", {})
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", "utf-8")
    lines = [line for group, rows in points.items() for line in (f"[{group}]", *(f"{k} = {v}" for k, v in rows.items()))]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n", "utf-8")
    root = project / "src" if (project / "src").is_dir() else project
    entries = tuple(
        Found(distribution=name, version=version, entry_point=key, value=value)
        for key, value in points.get(ENTRY_POINT_GROUP, {}).items()
    )
    return Subject(
        origin=str(project),
        distribution=name,
        version=version,
        entries=entries,
        requires=tuple(table.get("dependencies", ())),
        requires_python=table.get("requires-python", ""),
        search=(folder, root),
        packages=_packages_below(root, entries),
    )


def _read_project(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_PROJECT_BYTES:
            raise _unusable(str(path), f"longer than {MAX_PROJECT_BYTES} bytes")
        data = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise _unusable(str(path), str(error)) from error
    table = data.get("project")
    if not isinstance(table, dict) or not isinstance(table.get("name"), str):
        raise _unusable(str(path), "no table [project] with a name")
    if "version" in table.get("dynamic", ()):
        table["version"] = _dynamic_version(path.parent, data)
    return table


def _dynamic_version(project: Path, data: Mapping[str, Any]) -> str:
    """The version that hatchling would read from a file; ``0`` where another build tool knows it."""
    from ast import Assign, Constant, parse

    place = data.get("tool", {}).get("hatch", {}).get("version", {}).get("path")
    if not isinstance(place, str) or not (project / place).is_file():
        return UNKNOWN_VERSION
    values = [node.value for node in parse((project / place).read_text("utf-8")).body if isinstance(node, Assign)]
    return next((str(one.value) for one in values if isinstance(one, Constant)), UNKNOWN_VERSION)


def _packages_below(root: Path, entries: Sequence[Found]) -> dict[str, Path]:
    """The top packages of the entry points, where they lie."""
    packages = {}
    for name in dict.fromkeys(_top(one) for one in entries):
        found = [path for path in (root / name, root / f"{name}.py") if path.exists()]
        if found:
            packages[name] = found[0]
    return packages


def _top(found: Found) -> str:
    return found.value.partition(":")[0].partition(".")[0]


def _from_wheel(path: Path, folder: Path) -> Subject:
    files = _unpack(path, folder)
    distributions = list(importlib_metadata.distributions(path=[str(folder)]))
    if len(distributions) != 1:
        raise _unusable(str(path), f"{len(distributions)} .dist-info folders")
    return _of_metadata(distributions[0], str(path), search=(folder,), root=folder, files=files)


def _unpack(path: Path, folder: Path) -> tuple[str, ...]:
    """Unpack a wheel. Raises ConfigError for one that would write elsewhere, or is larger than any real one."""
    try:
        with zipfile.ZipFile(path) as archive:
            rows = archive.infolist()
            if sum(row.file_size for row in rows) > MAX_UNPACKED_BYTES or len(rows) > MAX_FILES:
                raise _unusable(str(path), "larger than a wheel can be")
            outside = [
                row.filename for row in rows if ".." in PurePosixPath(row.filename).parts or row.filename.startswith("/")
            ]
            if outside:
                raise _unusable(str(path), f"a file outside of the wheel: {outside[0]}")
            archive.extractall(folder)
            return tuple(row.filename for row in rows if not row.is_dir())
    except (OSError, zipfile.BadZipFile) as error:
        raise _unusable(str(path), str(error)) from error


def _installed(name: str) -> tuple[Subject, ...]:
    found = find()
    named = [one for one in found if not name or one.answers_to(name)]
    if not named:
        known = {one.entry_point for one in found}
        raise UnknownPlatformError(
            "Unknown plugin" if name else "No plugin is installed",
            on=name or ENTRY_POINT_GROUP,
            found="no entry point has this name" if name else "no entry point",
            expected=f"an installed plugin of the group {ENTRY_POINT_GROUP}, a project folder or a wheel",
            fix=nearest(name, known) if name and known else "install it, or name its folder: vllm-core plugin check ./FOLDER",
        )
    subjects = []
    for distribution in dict.fromkeys(one.distribution for one in named):
        entries = tuple(one for one in named if one.distribution == distribution)
        subjects.append(_of_metadata(importlib_metadata.distribution(distribution), "installed", entries=entries))
    return tuple(subjects)


def _of_metadata(
    distribution: importlib_metadata.Distribution,
    origin: str,
    *,
    entries: tuple[Found, ...] | None = None,
    search: tuple[Path, ...] = (),
    root: Path | None = None,
    files: tuple[str, ...] | None = None,
) -> Subject:
    if entries is None:
        rows = distribution.entry_points.select(group=ENTRY_POINT_GROUP)
        entries = tuple(
            Found(distribution=distribution.name, version=distribution.version, entry_point=one.name, value=one.value)
            for one in rows
        )
    return Subject(
        origin=origin,
        distribution=distribution.name,
        version=distribution.version,
        entries=entries,
        requires=tuple(distribution.requires or ()),
        requires_python=str(distribution.metadata.get("Requires-Python") or ""),
        search=search,
        packages=_packages_below(root, entries) if root is not None else _importable(entries),
        files=files,
    )


def _importable(entries: Sequence[Found]) -> dict[str, Path]:
    """Where the top packages of installed entry points lie; found without importing them."""
    packages = {}
    for name in dict.fromkeys(_top(one) for one in entries):
        spec = find_spec(name)
        if spec is not None and spec.submodule_search_locations:
            # An editable install may be spread over folders: its sources lie where its own file does.
            own = Path(spec.origin).parent if spec.has_location and spec.origin else None
            packages[name] = own or Path(next(iter(spec.submodule_search_locations)))
        elif spec is not None and spec.origin is not None:
            packages[name] = Path(spec.origin)
    return packages


def _unusable(path: str, found: str) -> ConfigError:
    return ConfigError(
        "Nothing to check",
        on=path,
        found=found,
        expected="a folder with a pyproject.toml, a wheel, or the name of an installed platform or distribution",
        fix="name one of them; `vllm-core plugin new NAME` writes a folder",
    )
