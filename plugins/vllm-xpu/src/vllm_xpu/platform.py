"""Configuration and start of an engine process on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllm_core.api import ConfigPatch, DeviceFacts
from vllm_triton.steps import configured


def configure(config: Mapping[str, Any], explicit: frozenset[str]) -> ConfigPatch:
    """Larger steps than a host takes."""
    return configured(explicit)


def start(device: DeviceFacts) -> None:
    """Choose the kernels' block sizes for the device."""
    from vllm_triton.tuning import use
    from vllm_xpu.backends.families import family_of

    family = family_of(device.architecture)
    assert family is not None, "nothing is offered for other architectures"
    tuning = replace(family.tuning, tried=family.tried)
    use(tuning, int(device.properties.get("multiprocessors", "1")))
