"""Configuration for an NPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_core.api import ConfigPatch
from vllm_triton.steps import configured

GRAPH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Fewer than memory would hold: each graph takes some of the chip's streams, of which there are few."""


def configure(config: Mapping[str, Any], explicit: frozenset[str]) -> ConfigPatch:
    """Larger steps than a host takes, and the sizes at which decode steps are captured. The block size is negotiated."""
    return configured(explicit, GRAPH_SIZES)
