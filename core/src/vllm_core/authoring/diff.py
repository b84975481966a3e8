"""What changed in the contract between two versions of core, and what it means for a plugin that was built for the first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vllm_core.api import API_VERSION
from vllm_core.authoring import describe as describing
from vllm_core.errors import ConfigError, nearest
from vllm_core.registry.probe import child_environment

RECORDED = Path(__file__).with_name("recorded")
CURRENT = "current"
TIMEOUT_S = 60.0
MAX_BYTES = 16 << 20

Weight = Literal["breaks", "changes", "adds"]
"""`breaks`: a plugin that uses it does not work as it did. `changes`: look at it. `adds`: nothing to do, something to gain."""


@dataclass(frozen=True, slots=True)
class Change:
    """One difference: where it is, as a dotted path, and both sides (empty: not there)."""

    weight: Weight
    on: str
    old: str
    new: str


def recorded_versions() -> list[str]:
    """API versions of which this core has a description."""
    return sorted((path.stem for path in RECORDED.glob("*.json")), key=lambda name: tuple(map(int, name.split("."))))


def current_version() -> str:
    """The API version of this core."""
    return f"{API_VERSION[0]}.{API_VERSION[1]}"


def describe(which: str) -> dict[str, Any]:
    """The description of a recorded version, of this core (``current``), or of a folder or wheel of core.

    A folder or wheel is imported in a child process, with what else is installed here. Raises ConfigError.
    """
    if which == CURRENT:
        return _of_json(describing.to_text(describing.describe()), which)
    path = RECORDED / f"{which}.json"
    if which in recorded_versions():
        return _of_json(path.read_text("utf-8"), which)
    place = Path(which)
    if place.is_dir():
        return _of_folder(place)
    if place.suffix == ".whl" and place.is_file():
        return _of_wheel(place)
    raise ConfigError(
        "Version of the API is not known",
        on=which,
        found="neither a recorded version nor a folder or wheel of vllm-core",
        expected=f"one of {', '.join([*recorded_versions(), CURRENT])}, or a path",
        fix=nearest(which, [*recorded_versions(), CURRENT]),
    )


def _of_folder(folder: Path) -> dict[str, Any]:
    """A checkout (``core/src``, ``src``) or a folder that holds the package ``vllm_core``."""
    places = [folder / "core" / "src", folder / "src", folder, folder.parent]
    needed = ("vllm_core/__init__.py", "vllm_core/api/__init__.py")
    root = next((place for place in places if all((place / name).is_file() for name in needed)), None)
    if root is None:
        raise _not_core(str(folder), "no package vllm_core with an api in it")
    environment = child_environment(os.environ, first=(root.resolve(),))
    try:
        done = subprocess.run(
            [sys.executable, describing.__file__],
            env=environment,
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
            cwd=os.sep,
        )
    except subprocess.TimeoutExpired as error:
        raise _not_core(str(folder), f"no answer within {TIMEOUT_S:g} s") from error
    if done.returncode != 0:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines() or [f"exit status {done.returncode}"]
        raise _not_core(str(folder), lines[-1])
    return _of_json(done.stdout[:MAX_BYTES].decode("utf-8"), str(folder))


def _of_wheel(path: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="vllm-core-api-") as folder:
        try:
            with zipfile.ZipFile(path) as archive:
                names = [one.filename for one in archive.infolist() if one.filename.startswith("vllm_core/")]
                wanted = [name for name in names if name.endswith((".py", ".toml")) and ".." not in name]
                if sum(archive.getinfo(name).file_size for name in wanted) > MAX_BYTES:
                    raise _not_core(str(path), f"longer than {MAX_BYTES} bytes")
                archive.extractall(folder, wanted)
        except (OSError, zipfile.BadZipFile) as error:
            raise _not_core(str(path), str(error)) from error
        return _of_folder(Path(folder))


def _of_json(text: str, which: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(text)
    if data.get("format") != describing.FORMAT:
        raise _not_core(which, f"a description of format {data.get('format')}")
    return data


def _not_core(on: str, found: str) -> ConfigError:
    return ConfigError(
        "API cannot be described",
        on=on,
        found=found,
        expected="a version of vllm-core",
        fix="name its checkout, its wheel or its version",
    )


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """Every difference, what breaks first."""
    changes = list(_walk((), old, new))
    order = {"breaks": 0, "changes": 1, "adds": 2}
    return sorted(changes, key=lambda one: (order[one.weight], one.on))


def _walk(path: tuple[str, ...], old: Any, new: Any) -> Iterator[Change]:
    if old == new:
        return
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in [*old, *(key for key in new if key not in old)]:
            if key not in new:
                yield Change(_weight_removed((*path, key)), ".".join((*path, key)), _short(old[key]), "")
            elif key not in old:
                yield Change(_weight_added((*path, key), new[key]), ".".join((*path, key)), "", _short(new[key]))
            else:
                yield from _walk((*path, key), old[key], new[key])
        return
    only_adds = path[-1] == "schema" and _adds_optional_arguments(str(old), str(new))
    yield Change("adds" if only_adds else _weight_changed(path), ".".join(path), _short(old), _short(new))


def _weight_removed(path: tuple[str, ...]) -> Weight:
    return "changes" if path[-1] in ("default", "value") else "breaks"


def _weight_added(path: tuple[str, ...], entry: Any) -> Weight:
    """An addition breaks where a plugin must have it: a hook, an abstract method, a field without default."""
    required = isinstance(entry, Mapping) and (entry.get("required") is True or entry.get("abstract") is True)
    is_hook = len(path) == 2 and path[0] == "hooks"
    return "breaks" if required or is_hook else "adds"


def _weight_changed(path: tuple[str, ...]) -> Weight:
    if path[0] in ("version", "format"):
        return "changes"
    if (
        path[-1] in ("default", "returns", "value", "type", "bases", "since", "features", "decomposition")
        or "tolerances" in path
    ):
        return "changes"
    return "breaks"


def _adds_optional_arguments(old: str, new: str) -> bool:
    """Whether a schema gained nothing but arguments with a default behind all others: who does not take them goes on."""
    (before, _, returned), (after, _, returns) = old.partition(" -> "), new.partition(" -> ")
    begin = f"{before.removesuffix(')')}, "
    added = after.removeprefix(begin).removesuffix(")").split(", ")
    return after.startswith(begin) and returned == returns and all(" = " in one for one in added)


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        for key in ("schema", "signature", "type", "value"):
            if key in value:
                return str(value[key])
        return ", ".join(value) or "nothing"
    return str(value)
