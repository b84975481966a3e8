"""The plugin's ops as a provider that core's checker understands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from vllm_core.api import load_entry
from vllm_core.ops import check
from vllm_cpu import native, native_kv
from vllm_cpu.backends import generic
from vllm_cpu.backends import native as native_offers


@pytest.fixture(scope="session")
def own_ops() -> dict[str, Callable[..., Any]]:
    """Every op that the plugin offers by default, without native code."""
    offers = [offer for offer in generic.offers() if offer.provider == generic.PROVIDER]
    return {name: load_entry(entry) for offer in offers for name, entry in offer.ops.items()}


@pytest.fixture(scope="session")
def provider(own_ops) -> check.Provider:
    """The offered ops with the plugin's KV layout."""
    return check.Provider(own_ops, generic.kv_layout)


@pytest.fixture(scope="session")
def library():
    """The native library that this process uses."""
    found = native.load()
    if found.library is None:
        pytest.skip(str(found))
    return found.library


@pytest.fixture(scope="session")
def native_ops(library, own_ops) -> dict[str, Callable[..., Any]]:
    """Every op of the native library but linear's and embedding; the plugin's other ops for the rest."""
    return own_ops | {name: load_entry(entry) for offer in native_offers.offers() for name, entry in offer.ops.items()}


@pytest.fixture(scope="session")
def native_provider(native_ops) -> check.Provider:
    """These ops with the library's KV layout."""
    return check.Provider(native_ops, native_kv.kv_layout)
