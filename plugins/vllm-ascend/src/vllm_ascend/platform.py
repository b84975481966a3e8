"""Configuration for an NPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_core.api import ConfigPatch

BATCHED_TOKENS = 8192
"""Tokens of a step: enough that the products of a prompt run at the chip's rate, and launches hide behind them."""


def configure(config: Mapping[str, Any], explicit: frozenset[str]) -> ConfigPatch:
    """Larger steps than a host takes. The block size is negotiated: the attention offers 128 and its multiples."""
    if "max_num_batched_tokens" in explicit:
        return ConfigPatch(changes={}, reasons={})
    reason = f"{BATCHED_TOKENS}: products of fewer rows leave the chip idle, unless set"
    return ConfigPatch(changes={"max_num_batched_tokens": BATCHED_TOKENS}, reasons={"max_num_batched_tokens": reason})
