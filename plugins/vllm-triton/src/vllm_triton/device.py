"""A `Device` over the part of torch that serves one kind of accelerator: memory, streams, events, pinned copies.

`torch.cuda` (whatever it was built for) and `torch.xpu` answer the same questions under the same names, written down in
`Runtime`. A platform gives its own; this module names no hardware.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from vllm_core.api import POOLS, Device, DeviceFacts, Eager, Event, MemoryBudgetError, MemoryStats, Pool

STAGING_BYTES = 64 << 20
"""Pinned memory through which weights travel: two such buffers, one filled while the other is copied."""


class Runtime(Protocol):
    """What is used of such a part of torch."""

    Event: Any
    Stream: Any

    def set_device(self, device: Any) -> None:
        """Choose the device of this thread."""

    def synchronize(self, device: Any) -> None:
        """Wait for all its work."""

    def empty_cache(self) -> None:
        """Give unused memory back."""

    def mem_get_info(self, device: Any) -> tuple[int, int]:
        """Free and total bytes."""

    def memory_reserved(self, device: Any) -> int:
        """Bytes that torch holds."""

    def memory_allocated(self, device: Any) -> int:
        """Bytes of them that tensors use."""

    def manual_seed(self, seed: int) -> None:
        """Seed the device's generator."""


class StreamEvent:
    """A point in the engine's stream."""

    __slots__ = ("_event",)

    def __init__(self, runtime: Runtime) -> None:
        self._event = runtime.Event()

    def record(self) -> None:
        """Mark the current point."""
        self._event.record()

    def wait(self) -> None:
        """Block until it is reached."""
        self._event.synchronize()

    def query(self) -> bool:
        """Whether it is reached."""
        return bool(self._event.query())


class StreamDevice(Device):
    """One device, through torch's allocator. A pool's bytes count from allocation until the pool is released."""

    eager = Eager("full")
    asynchronous = True
    stable_addresses = False
    supports_graphs = False

    def __init__(self, facts: DeviceFacts, runtime: Runtime, torch_type: str) -> None:
        self.facts = facts
        self.torch_device = f"{torch_type}:{facts.properties.get('index', '0')}"
        self._runtime = runtime
        self._device = torch.device(self.torch_device)
        runtime.set_device(self._device)
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
        """Copy a host tensor to the device through pinned memory; one that is there is counted. Raises MemoryBudgetError."""
        size, there = host.numel() * host.element_size(), host.device == self._device
        try:
            if there:
                # A part would keep the whole that it was cut from.
                target = host if host.untyped_storage().nbytes() == size else host.clone()
            else:
                target = torch.empty(host.shape, dtype=host.dtype, device=self._device)
        except torch.OutOfMemoryError as error:
            raise self._short(pool, size) from error
        if not there:
            self._upload(target.view(-1).view(torch.uint8), host.contiguous().view(-1).view(torch.uint8))
        self._count(pool, size)
        return target

    def _upload(self, target: Tensor, source: Tensor) -> None:
        """Copy bytes in pieces: the host fills one buffer while the other is on its way."""
        if not self._staging:
            self._staging = [(self.pinned((STAGING_BYTES,), torch.uint8), self._runtime.Event()) for _ in range(2)]
        for turn, begin in enumerate(range(0, source.numel(), STAGING_BYTES)):
            piece = source[begin : begin + STAGING_BYTES]
            buffer, event = self._staging[turn % 2]
            event.synchronize()
            buffer[: piece.numel()].copy_(piece)
            target[begin : begin + piece.numel()].copy_(buffer[: piece.numel()], non_blocking=True)
            event.record()
        # The next tensor starts with the buffer that has had the longest time to be copied.
        if -(-source.numel() // STAGING_BYTES) % 2:
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
        self._runtime.empty_cache()
        return size

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Page-locked host memory."""
        return torch.zeros(tuple(shape), dtype=dtype, pin_memory=True)

    def statistics(self) -> MemoryStats:
        """Memory of the whole device, and of this process by pool."""
        available, total = self._runtime.mem_get_info(self._device)
        unused = self._runtime.memory_reserved(self._device) - self._runtime.memory_allocated(self._device)
        return MemoryStats(
            total_bytes=total,
            available_bytes=available + unused,
            own_bytes=dict(self._own),
            peak_own_bytes=self._peak,
        )

    def synchronize(self) -> None:
        """Wait for all queued work."""
        self._runtime.synchronize(self._device)

    def event(self) -> Event:
        """Return an event on the engine's stream."""
        return StreamEvent(self._runtime)

    def seed(self, value: int) -> None:
        """Seed the device's generator."""
        self._runtime.manual_seed(value)
