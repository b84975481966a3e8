"""The host as a `Device`: memory by pool, no queue; graphs are recordings."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from vllm_core.api import POOLS, Communicator, Device, DeviceFacts, Eager, Event, Graph, MemoryBudgetError, MemoryStats, Pool
from vllm_cpu import probe, recording
from vllm_cpu.backends import generic, native_linear
from vllm_cpu.pages import Pages

OWN = frozenset({generic.PROVIDER, generic.UNPADDED, native_linear.PROVIDER, native_linear.ROUNDING})
"""Providers of this package."""

PLACED_BYTES = 1 << 15
"""Weights from this size on are placed in large pages."""

MAPPED_BYTES = 1 << 20
"""From this size on memory comes from the kernel page by page as it is touched, zeroed and aligned to pages."""


RECORDED_ROWS = 32
"""Of steps with more rows what Python takes is a small part."""


def _available_bytes(facts: DeviceFacts) -> int:
    available = probe.memory_info().get("MemAvailable", facts.memory_bytes)
    limit, used = probe.memory_limit(), probe.memory_used()
    if limit is not None and used is not None:
        available = min(available, max(0, limit - used))
    return min(available, facts.memory_bytes)


class _Done:
    """An event of a device that has nothing queued: always reached."""

    def record(self) -> None:
        """Nothing is queued."""

    def wait(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Reached."""
        return True


class CpuDevice(Device):
    """Memory of this host, as far as the control group grants it.

    A pool's bytes count from allocation until the pool is released, whether or not the tensors are still in use.
    """

    torch_device = "cpu"
    eager = Eager("full")
    asynchronous = False
    stable_addresses = False
    supports_graphs = True
    recorded_rows = RECORDED_ROWS

    def __init__(self, facts: DeviceFacts) -> None:
        self.facts = facts
        self._own: dict[Pool, int] = dict.fromkeys(POOLS, 0)
        self._peak = 0
        self._pages = Pages(partial(_available_bytes, self.facts))

    def allocate(self, pool: Pool, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a zero-filled tensor, aligned to 64 bytes at least. Raises MemoryBudgetError."""
        size = math.prod(shape) * dtype.itemsize
        if size < MAPPED_BYTES:
            tensor = torch.zeros(tuple(shape), dtype=dtype)
        else:
            self._check_fits(pool, size)
            tensor = torch.frombuffer(mmap.mmap(-1, size), dtype=dtype).view(tuple(shape))
        self._count(pool, size)
        return tensor

    def _check_fits(self, pool: Pool, size: int) -> None:
        available = _available_bytes(self.facts)
        if size > available:
            raise MemoryBudgetError(
                "Not enough memory",
                on=f"pool {pool!r} of {self.facts.name}",
                found=f"{available} bytes available",
                expected=f"{size} bytes",
                fix="lower --max-num-seqs, --max-model-len or --kv-cache-memory-bytes, or give the container more memory",
            )

    def _count(self, pool: Pool, size: int) -> None:
        self._own[pool] += size
        self._peak = max(self._peak, sum(self._own.values()))

    def adopt(self, pool: Pool, host: torch.Tensor) -> torch.Tensor:
        """Return the tensor itself, or of the larger weights a copy in large pages, which lets go of what it was made from."""
        size = host.numel() * host.element_size()
        placed = self._pages.place(host) if pool == "weights" and size >= PLACED_BYTES else None
        self._count(pool, size)
        return host.contiguous() if placed is None else placed

    def release(self, pool: Pool) -> int:
        """Stop counting the pool; the memory goes with the last tensor that uses it."""
        if pool == "weights":
            self._pages = Pages(partial(_available_bytes, self.facts))
        size, self._own[pool] = self._own[pool], 0
        return size

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Plain memory: no copy engine needs more."""
        return torch.zeros(tuple(shape), dtype=dtype)

    def statistics(self) -> MemoryStats:
        """Total and available memory, both bounded by the control group."""
        return MemoryStats(
            total_bytes=self.facts.memory_bytes,
            available_bytes=_available_bytes(self.facts),
            own_bytes=dict(self._own),
            peak_own_bytes=self._peak,
        )

    def synchronize(self) -> None:
        """Nothing is queued."""

    def event(self) -> Event:
        """Return an event that is always reached."""
        return _Done()

    def capture(self, work: Callable[[], None]) -> Graph:
        """Run ``work`` and note what it calls. Raises UnsupportedError where calling the same again would not do the same."""
        return recording.record(work)

    def bind(self, op: Callable[..., Any], provider: str) -> Callable[..., Any]:
        """This package's ops note what they do themselves; of others' the whole call is noted."""
        return op if provider in OWN else recording.recorded(op)

    def communicator(self, rank: int, world_size: int, rendezvous: str) -> Communicator:
        """Join a gloo group over the loopback interface."""
        from vllm_cpu.ops.comm import GlooCommunicator

        return GlooCommunicator(rank, world_size, rendezvous)

    def seed(self, value: int) -> None:
        """Seed torch's generator of the host."""
        torch.manual_seed(value)
