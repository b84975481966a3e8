"""Configuration and start of an engine process on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllm_core.api import ConfigPatch, DeviceFacts

BATCHED_TOKENS = 8192
"""Tokens of a step: enough that the products of a prompt run at the chip's rate, and launches hide behind them."""


def configure(config: Mapping[str, Any], explicit: frozenset[str]) -> ConfigPatch:
    """Larger steps than a host takes."""
    if "max_num_batched_tokens" in explicit:
        return ConfigPatch(changes={}, reasons={})
    reason = f"{BATCHED_TOKENS}: products of fewer rows leave the chip idle, unless set"
    return ConfigPatch(changes={"max_num_batched_tokens": BATCHED_TOKENS}, reasons={"max_num_batched_tokens": reason})


def start(device: DeviceFacts) -> None:
    """Choose the kernels' block sizes for the device."""
    from vllm_triton import tried
    from vllm_triton.tuning import use
    from vllm_xpu.backends.families import family_of

    family = family_of(device.architecture)
    assert family is not None, "nothing is offered for other architectures"
    tuning = replace(family.tuning, kv_dtypes=tried.KV_DTYPES)
    use(tuning, int(device.properties.get("multiprocessors", "1")))
