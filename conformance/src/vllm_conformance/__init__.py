"""Proves what a platform of vllm-core claims, both ways."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_conformance.declaration import Conformance

__all__ = ["Conformance"]


def __getattr__(name: str) -> object:
    """Late, so that a child process does not load what only a parent needs."""
    if name != "Conformance":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm_conformance.declaration import Conformance

    return Conformance
