"""The plugin's ops as a provider that core's checker understands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from vllm_core.api import load_entry
from vllm_core.ops import check
from vllm_cpu.backends import generic


@pytest.fixture(scope="session")
def own_ops() -> dict[str, Callable[..., Any]]:
    """Every op that the plugin offers by default, without native code."""
    offers = [offer for offer in generic.offers() if offer.provider == generic.PROVIDER]
    return {name: load_entry(entry) for offer in offers for name, entry in offer.ops.items()}


@pytest.fixture(scope="session")
def provider(own_ops) -> check.Provider:
    """The offered ops with the plugin's KV layout."""
    return check.Provider(own_ops, generic.kv_layout)
