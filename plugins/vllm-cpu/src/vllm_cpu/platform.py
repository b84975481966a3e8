"""Configuration and start of an engine process on the host."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from vllm_core.api import ConfigPatch, DeviceFacts
from vllm_cpu import native

SIZES = frozenset({"kv_cache_memory_bytes", "num_gpu_blocks_override", "device_memory_utilization"})
"""Options by which a user sizes the KV cache. Core's default, most of the memory, does not suit a host that others use."""

KV_SHARE = 0.25
KV_LIMIT_BYTES = 4 << 30


def configure(config: Mapping[str, Any], explicit: frozenset[str]) -> ConfigPatch:
    """Give the KV cache a quarter of the memory, 4 GiB at most, unless the user sized it; workers divide it."""
    memory = int(config.get("memory_bytes", 0))
    if explicit & SIZES or not memory:
        return ConfigPatch(changes={}, reasons={})
    workers = int(config.get("tensor_parallel_size", 1))
    size = min(int(memory * KV_SHARE), KV_LIMIT_BYTES) // workers
    shared = f", divided by {workers} workers" if workers > 1 else ""
    reason = f"{size >> 20} MiB: a quarter of the host's memory, 4 GiB at most, unless set{shared}"
    return ConfigPatch(changes={"kv_cache_memory_bytes": size}, reasons={"kv_cache_memory_bytes": reason})


def start(device: DeviceFacts, sharers: int = 1) -> None:
    """Let torch and the native library use this process's share of the cores; torch sleeps where it waits, unless the user's
    `OMP_*` variables say other things.

    Raises UnsupportedError where the native library that the user names cannot be used.
    """
    # Read once, when torch is imported: threads that spin at a barrier slow each other many times on a busy host.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    import torch

    threads = max(1, int(device.properties.get("cores", "1")) // sharers)
    given = os.environ.get("OMP_NUM_THREADS", "")
    native.set_threads(int(given) if given.isdecimal() else threads)
    if not given:
        torch.set_num_threads(threads)
