"""The host's side of the device: an account of its memory. No op of the host reaches it, so `eager` is none."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from vllm_core.api import POOLS, Device, DeviceFacts, Eager, Event, MemoryBudgetError, MemoryStats, Pool


class Reached:
    """An event of a device whose answers are waited for elsewhere."""

    def __init__(self, device: StaticDevice) -> None:
        self._device = device

    def record(self) -> None:
        """Nothing is queued from here."""

    def wait(self) -> None:
        """Wait for all steps."""
        self._device.synchronize()

    def query(self) -> bool:
        """Reached."""
        return True


class StaticDevice(Device):
    """Steps run in the process that `StaticProgram` starts; what is allocated here is staging memory of the host."""

    torch_device = "cpu"
    eager = Eager("none")
    asynchronous = True
    stable_addresses = False
    supports_graphs = False

    def __init__(self, facts: DeviceFacts) -> None:
        self.facts = facts
        self.wait: Callable[[], None] = lambda: None
        self._own: dict[Pool, int] = dict.fromkeys(POOLS, 0)
        self._peak = 0

    def count(self, pool: Pool, size: int) -> None:
        """Count bytes that the device is asked to hold. Raises MemoryBudgetError."""
        free = self.facts.memory_bytes - sum(self._own.values())
        if size > free:
            raise MemoryBudgetError(
                "Not enough memory",
                on=f"pool {pool!r} of {self.facts.name}",
                found=f"{free} bytes free",
                expected=f"{size} bytes",
                fix="choose a smaller model, or lower --max-model-len",
            )
        self._own[pool] += size
        self._peak = max(self._peak, sum(self._own.values()))

    def allocate(self, pool: Pool, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return zero-filled staging memory."""
        self.count(pool, math.prod(shape) * dtype.itemsize)
        return torch.zeros(tuple(shape), dtype=dtype)

    def adopt(self, pool: Pool, host: torch.Tensor) -> torch.Tensor:
        """Return a copy in staging memory."""
        self.count(pool, host.nbytes)
        return host.clone(memory_format=torch.contiguous_format)

    def release(self, pool: Pool) -> int:
        """Stop counting the pool; the device's process gives the memory back when it ends."""
        size, self._own[pool] = self._own[pool], 0
        return size

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Plain memory: it is copied into messages."""
        return torch.zeros(tuple(shape), dtype=dtype)

    def statistics(self) -> MemoryStats:
        """The account."""
        total, used = self.facts.memory_bytes, sum(self._own.values())
        return MemoryStats(
            total_bytes=total, available_bytes=total - used, own_bytes=dict(self._own), peak_own_bytes=self._peak
        )

    def synchronize(self) -> None:
        """Wait for all steps; raises what they raised."""
        self.wait()

    def event(self) -> Event:
        """Return an event that is always reached."""
        return Reached(self)

    def seed(self, value: int) -> None:
        """The device draws nothing of its own."""
