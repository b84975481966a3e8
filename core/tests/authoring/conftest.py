"""A plugin as `plugin new` writes it, changed at one place, and checked."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_core.authoring.check import Checked, check
from vllm_core.authoring.finding import Finding
from vllm_core.authoring.scaffold import write

PACKAGE = Path("src", "vllm_acme")


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """Folder of a new distribution."""
    return write("acme", tmp_path)


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """This environment without our variables, and with a cache of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    return {**kept, "VLLM_CORE_CACHE": str(tmp_path / "cache")}


@pytest.fixture
def edit(written: Path) -> Callable[[str, str, str], None]:
    """Replace text in a file of the distribution; the path is below the package, or that of another file."""

    def replace(name: str, old: str, new: str) -> None:
        path = written / PACKAGE / name if (written / PACKAGE / name).exists() else written / name
        text = path.read_text()
        assert old in text, f"{old!r} is not in {path}"
        path.write_text(text.replace(old, new, 1))

    return replace


@pytest.fixture
def add(written: Path) -> Callable[[str, str], None]:
    """Append text to a file of the package, made if it is not there."""

    def append(name: str, text: str) -> None:
        path = written / PACKAGE / name
        path.write_text((path.read_text() if path.exists() else "") + text)

    return append


@pytest.fixture
def checked(written: Path, environ: dict[str, str]) -> Callable[[], Checked]:
    """Check the distribution's folder."""

    def run() -> Checked:
        (one,) = check(str(written), environ)
        return one

    return run


@pytest.fixture
def failures(checked: Callable[[], Checked]) -> Callable[[], list[Finding]]:
    """What failed, each with all four parts."""

    def run() -> list[Finding]:
        found = [one for one in checked().findings if one.outcome == "failed"]
        assert all(one.on and one.found and one.expected and one.fix for one in found)
        return found

    return run
