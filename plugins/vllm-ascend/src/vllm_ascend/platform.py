"""Configuration for an NPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_core.api import ConfigPatch

BATCHED_TOKENS = 8192
"""Tokens of a step: enough that the products of a prompt run at the chip's rate, and launches hide behind them."""

GRAPH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Fewer than memory would hold: each graph takes some of the chip's streams, of which there are few."""


def configure(config: Mapping[str, Any], explicit: frozenset[str]) -> ConfigPatch:
    """Larger steps than a host takes, and the sizes at which decode steps are captured. The block size is negotiated."""
    changes: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    if "max_num_batched_tokens" not in explicit:
        changes["max_num_batched_tokens"] = BATCHED_TOKENS
        reasons["max_num_batched_tokens"] = f"{BATCHED_TOKENS}: products of fewer rows leave the chip idle, unless set"
    if "graph_sizes" not in explicit:
        changes["graph_sizes"] = list(GRAPH_SIZES)
        reasons["graph_sizes"] = f"{len(GRAPH_SIZES)} sizes up to {GRAPH_SIZES[-1]} sequences, captured when first used"
    return ConfigPatch(changes=changes, reasons=reasons)
