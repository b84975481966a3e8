"""An NPU as a `Device`: memory by pool, events, copies through pinned memory. Importing this module imports torch_npu."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch_npu
from torch import Tensor

from vllm_core.api import POOLS, Device, DeviceFacts, Eager, Event, MemoryBudgetError, MemoryStats, Pool

npu: Any = torch_npu.npu

STAGING_BYTES = 64 << 20
"""Pinned memory through which weights travel: two such buffers, one filled while the other is copied."""


class _Event:
    """A point in the engine's stream."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = npu.Event()

    def record(self) -> None:
        """Mark the current point."""
        self._event.record()

    def wait(self) -> None:
        """Block until it is reached."""
        self._event.synchronize()

    def query(self) -> bool:
        """Whether it is reached."""
        return bool(self._event.query())


class NpuDevice(Device):
    """One NPU, through torch_npu's allocator. A pool's bytes count from allocation until the pool is released."""

    eager = Eager("full")
    asynchronous = True
    stable_addresses = False
    supports_graphs = False

    def __init__(self, facts: DeviceFacts) -> None:
        self.facts = facts
        self.torch_device = f"npu:{facts.properties.get('index', '0')}"
        self._device = torch.device(self.torch_device)
        npu.set_device(self._device)
        self._own: dict[Pool, int] = dict.fromkeys(POOLS, 0)
        self._peak = 0
        self._staging: list[tuple[Tensor, Any]] = []

    def allocate(self, pool: Pool, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a zero-filled tensor. Raises MemoryBudgetError."""
        size = math.prod(shape) * dtype.itemsize
        try:
            tensor = torch.zeros(tuple(shape), dtype=dtype, device=self._device)
        except torch.OutOfMemoryError as error:
            raise self._short(pool, size) from error
        self._count(pool, size)
        return tensor

    def adopt(self, pool: Pool, host: Tensor) -> Tensor:
        """Copy a host tensor to the NPU through pinned memory. Raises MemoryBudgetError."""
        if host.device == self._device:
            return host
        size = host.numel() * host.element_size()
        try:
            target = torch.empty(host.shape, dtype=host.dtype, device=self._device)
        except torch.OutOfMemoryError as error:
            raise self._short(pool, size) from error
        self._upload(target.view(-1).view(torch.uint8), host.contiguous().view(-1).view(torch.uint8))
        self._count(pool, size)
        return target

    def _upload(self, target: Tensor, source: Tensor) -> None:
        """Copy bytes in pieces: the host fills one buffer while the other is on its way."""
        if not self._staging:
            self._staging = [(torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=True), npu.Event()) for _ in range(2)]
        for turn, begin in enumerate(range(0, source.numel(), STAGING_BYTES)):
            piece = source[begin : begin + STAGING_BYTES]
            buffer, event = self._staging[turn % 2]
            event.synchronize()
            buffer[: piece.numel()].copy_(piece)
            target[begin : begin + piece.numel()].copy_(buffer[: piece.numel()], non_blocking=True)
            event.record()
        # The next tensor starts with the first buffer again.
        self._staging.reverse()

    def _short(self, pool: Pool, size: int) -> MemoryBudgetError:
        return MemoryBudgetError(
            "Not enough memory",
            on=f"pool {pool!r} of {self.facts.name}",
            found=f"{self.statistics().available_bytes} bytes available",
            expected=f"{size} bytes",
            fix="lower --max-num-seqs, --max-model-len, --kv-cache-memory-bytes or --device-memory-utilization",
        )

    def _count(self, pool: Pool, size: int) -> None:
        self._own[pool] += size
        self._peak = max(self._peak, sum(self._own.values()))

    def release(self, pool: Pool) -> int:
        """Stop counting the pool, and give back what no tensor uses any more."""
        size, self._own[pool] = self._own[pool], 0
        npu.empty_cache()
        return size

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Page-locked host memory."""
        return torch.zeros(tuple(shape), dtype=dtype, pin_memory=True)

    def statistics(self) -> MemoryStats:
        """Memory of the whole NPU, and of this process by pool."""
        available, total = npu.mem_get_info(self._device)
        unused = npu.memory_reserved(self._device) - npu.memory_allocated(self._device)
        return MemoryStats(
            total_bytes=total, available_bytes=available + unused, own_bytes=dict(self._own), peak_own_bytes=self._peak
        )

    def synchronize(self) -> None:
        """Wait for all queued work."""
        npu.synchronize(self._device)

    def event(self) -> Event:
        """Return an event on the engine's stream."""
        return _Event()

    def seed(self, value: int) -> None:
        """Seed the NPU's generator."""
        npu.manual_seed(value)
