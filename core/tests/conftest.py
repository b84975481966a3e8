"""Fixtures of all core tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """The engine's tests run on any platform: ``pytest core/tests/llm --platform toy``."""
    parser.addoption("--platform", metavar="NAME", help="platform of the tests that make engines; default: the best here")


@pytest.fixture(scope="session")
def platform(request: pytest.FixtureRequest) -> Iterator[str]:
    """The platform that engines of this session run on; those in other processes too."""
    name = request.config.getoption("--platform")
    with pytest.MonkeyPatch.context() as patch:
        if name is not None:
            patch.setenv("VLLM_PLATFORM", name)
        yield name or "cpu"


@pytest.fixture
def anyio_backend() -> str:
    """Async tests (``@pytest.mark.anyio``) run on asyncio."""
    return "asyncio"


@pytest.fixture(scope="session")
def model_file() -> Callable[[str], Path]:
    """Path of a real model in the cache; skips where it has not been fetched (tools/fetch_models.py)."""
    cache = Path(os.environ.get("VLLM_CORE_CACHE") or Path.home() / ".cache" / "vllm-core")

    def find(name: str) -> Path:
        path = cache / "models" / name
        if not path.exists():
            pytest.skip(f"{name} is not in {cache / 'models'}: python tools/fetch_models.py all")
        return path

    return find
