"""Configuration and start of an engine process on the host."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from vllm_core.api import ConfigPatch, DeviceFacts

from vllm_cpu import native

DEFAULT_UTILIZATION = 0.9
"""Core's default: a fraction that suits a device of its own, not a host that others use too."""

KV_SHARE = 0.25
KV_LIMIT_BYTES = 4 << 30


def configure(config: Mapping[str, Any]) -> ConfigPatch:
    """Give the KV cache a quarter of the memory, 4 GiB at most, unless the user sized it."""
    sized = config.get("kv_cache_memory_bytes") or config.get("num_gpu_blocks_override")
    memory = int(config.get("memory_bytes", 0))
    if sized or not memory or config.get("device_memory_utilization") != DEFAULT_UTILIZATION:
        return ConfigPatch(changes={}, reasons={})
    size = min(int(memory * KV_SHARE), KV_LIMIT_BYTES)
    return ConfigPatch(
        changes={"kv_cache_memory_bytes": size},
        reasons={"kv_cache_memory_bytes": f"{size >> 20} MiB: a quarter of the host's memory, 4 GiB at most, unless set"},
    )


def start(device: DeviceFacts) -> None:
    """Let torch use the cores that this process may use; `OMP_NUM_THREADS` is the user's word and stays.

    Raises UnsupportedError where the native library that the user names cannot be used.
    """
    import torch

    native.find()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, int(device.properties.get("cores", "1"))))
