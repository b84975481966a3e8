"""Every test draws the same numbers wherever it runs: torch seeds its generator anew in every process."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """The host's generator alone, and only where a test module brought torch in: some tests hold that nothing does."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.manual_seed(0)
