"""Configuration and start of an engine process on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_core.api import ConfigPatch, DeviceFacts
from vllm_triton.steps import configured

GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)


def configure(config: Mapping[str, Any], explicit: frozenset[str]) -> ConfigPatch:
    """Larger steps than a host takes, and the sizes at which decode steps are captured."""
    return configured(explicit, GRAPH_SIZES)


def start(device: DeviceFacts) -> None:
    """Choose the kernels' block sizes for the device, and have their keys computed before any is launched."""
    from vllm_cuda import chip
    from vllm_cuda.backends.families import family_of
    from vllm_triton.ahead import settle_keys
    from vllm_triton.tuning import use

    family = family_of(device.architecture)
    assert family is not None, "nothing is offered for other architectures"
    multiprocessors = int(device.properties.get("multiprocessors", "1"))
    use(family.tuning, multiprocessors)
    chip.use(chip.Chip(device.architecture, multiprocessors, family.shared_bytes))
    settle_keys()
