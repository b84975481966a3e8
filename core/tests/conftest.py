"""Fixtures of all core tests."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest


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
