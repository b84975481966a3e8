"""Sizes of the engine's steps on an accelerator, for `configure` of the platforms; imports no Triton."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from vllm_core.api import ConfigPatch

BATCHED_TOKENS = 8192
"""Tokens of a step: enough that the products of a prompt run at the chip's rate, and launches hide behind them."""


def configured(explicit: AbstractSet[str], graph_sizes: Sequence[int] = ()) -> ConfigPatch:
    """Larger steps than a host takes, and sizes at which decode steps are captured; what is in ``explicit`` stays."""
    changes: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    if "max_num_batched_tokens" not in explicit:
        changes["max_num_batched_tokens"] = BATCHED_TOKENS
        reasons["max_num_batched_tokens"] = f"{BATCHED_TOKENS}: products of fewer rows leave the chip idle, unless set"
    if graph_sizes and "graph_sizes" not in explicit:
        changes["graph_sizes"] = list(graph_sizes)
        reasons["graph_sizes"] = f"{len(graph_sizes)} sizes up to {graph_sizes[-1]} sequences, captured when first used"
    return ConfigPatch(changes=changes, reasons=reasons)
