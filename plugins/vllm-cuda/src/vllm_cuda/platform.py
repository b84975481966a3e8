"""Configuration and start of an engine process on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_core.api import ConfigPatch, DeviceFacts

BATCHED_TOKENS = 8192
"""Tokens of a step: enough that the products of a prompt run at the chip's rate, and launches hide behind them."""

GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)


def configure(config: Mapping[str, Any], explicit: frozenset[str]) -> ConfigPatch:
    """Larger steps than a host takes, and the sizes at which decode steps are captured."""
    changes: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    if "max_num_batched_tokens" not in explicit:
        changes["max_num_batched_tokens"] = BATCHED_TOKENS
        reasons["max_num_batched_tokens"] = f"{BATCHED_TOKENS}: products of fewer rows leave the chip idle, unless set"
    if "graph_sizes" not in explicit:
        changes["graph_sizes"] = list(GRAPH_SIZES)
        reasons["graph_sizes"] = f"{len(GRAPH_SIZES)} sizes up to {GRAPH_SIZES[-1]} sequences, captured when first used"
    return ConfigPatch(changes=changes, reasons=reasons)


def start(device: DeviceFacts) -> None:
    """Choose the kernels' block sizes for the device, and have their keys computed before any is launched."""
    from vllm_cuda.backends.families import family_of
    from vllm_triton.ahead import settle_keys
    from vllm_triton.tuning import use

    family = family_of(device.architecture)
    assert family is not None, "nothing is offered for other architectures"
    use(family.tuning, int(device.properties.get("multiprocessors", "1")))
    settle_keys()
