"""One simulated device: memory by pool, a queue, graphs, a slow link to its neighbour."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

from vllm_core.api import POOLS, Communicator, Device, DeviceFacts, Eager, Event, Graph, MemoryBudgetError, MemoryStats, Pool
from vllm_toy import settings
from vllm_toy.runtime import native

_opened = itertools.count()


class ToyEvent:
    """A point in the order of work; `wait` and `query` are the host's."""

    __slots__ = ("_event", "_index")

    def __init__(self, index: int) -> None:
        self._index = index
        self._event = torch.Event(f"toy:{index}")

    def record(self) -> None:
        """Mark what has been queued so far."""
        self._event.record(torch.accelerator.current_stream(self._index))

    def wait(self) -> None:
        """Run the device up to the mark; raises what its work raised."""
        self._event.synchronize()

    def query(self) -> bool:
        """Whether the mark has been reached."""
        return bool(self._event.query())


class ToyDevice(Device):
    """A device of this process. Its tensors are `torch.device("toy")`; nothing but its own work reads them."""

    eager = Eager("full")
    asynchronous = True
    stable_addresses = True
    supports_graphs = True

    def __init__(self, facts: DeviceFacts) -> None:
        self.facts = facts
        self.index = int(facts.id)
        self.torch_device = f"toy:{self.index}"
        self._native = native()
        self._native.set_device(self.index)
        self._first_pool = len(POOLS) * next(_opened)

    def _pool(self, pool: Pool) -> int:
        """Number of the pool; tests open a device several times in one process, each with pools of its own."""
        return self._first_pool + POOLS.index(pool)

    def allocate(self, pool: Pool, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a zero-filled tensor, aligned to 64 bytes. Raises MemoryBudgetError."""
        try:
            tensor: torch.Tensor = self._native.allocate(self.index, self._pool(pool), list(shape), dtype)
        except torch.OutOfMemoryError as error:
            raise self._out_of_memory(pool, error) from error
        return tensor

    def adopt(self, pool: Pool, host: torch.Tensor) -> torch.Tensor:
        """Copy the values to the device, and wait: ``host`` may go away."""
        tensor = self.allocate(pool, host.shape, host.dtype)
        tensor.copy_(host)
        self.synchronize()
        return tensor

    def release(self, pool: Pool) -> int:
        """Give the pool's memory back; its addresses stay reserved."""
        return int(self._native.release(self.index, self._pool(pool), False))

    def offload(self, pool: Pool) -> int:
        """Give the pool's memory back; its contents wait on the host."""
        return int(self._native.release(self.index, self._pool(pool), True))

    def restore(self, pool: Pool) -> None:
        """Bring a released pool back at its old addresses. Raises MemoryBudgetError."""
        try:
            self._native.restore(self.index, self._pool(pool))
        except torch.OutOfMemoryError as error:
            raise self._out_of_memory(pool, error) from error

    def _out_of_memory(self, pool: Pool, error: Exception) -> MemoryBudgetError:
        return MemoryBudgetError(
            "Not enough memory",
            on=f"pool {pool!r} of {self.facts.name} {self.index}",
            found=str(error).splitlines()[0],
            expected="memory for the tensor",
            fix="lower --max-num-seqs or --max-model-len, or raise VLLM_TOY_MEMORY_MIB",
        )

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return host memory that the device copies from and to while the host goes on."""
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def statistics(self) -> MemoryStats:
        """Memory now. What ops allocate for themselves is in no pool, and lowers what is available."""
        own = {pool: int(self._native.used(self.index, self._pool(pool))) for pool in POOLS}
        total = settings.memory_bytes()
        return MemoryStats(
            total_bytes=total,
            available_bytes=total - self._native.in_use(self.index),
            own_bytes=own,
            peak_own_bytes=self._native.peak(self.index),
        )

    def synchronize(self) -> None:
        """Run all that is queued; raises what it raised."""
        self._native.synchronize(self.index)

    def event(self) -> Event:
        """Return a new event."""
        return ToyEvent(self.index)

    def seed(self, value: int) -> None:
        """Seed the device's own generator."""
        self._native.seed(self.index, value)

    def capture(self, work: Callable[[], None]) -> Graph:
        """Record what ``work`` launches, without running it. Raises RuntimeError where it waits for the device."""
        self._native.begin_capture(self.index)
        try:
            work()
        finally:
            graph: Graph = self._native.end_capture()
        return graph

    def copy_to_peer(self, tensor: torch.Tensor, peer: Device) -> torch.Tensor:
        """Copy over the link, whose speed is simulated."""
        return tensor.to(peer.torch_device)

    def communicator(self, rank: int, world_size: int, rendezvous: str) -> Communicator:
        """Join a group of processes; see `vllm_toy.comm`."""
        from vllm_toy.comm import ToyCommunicator

        return ToyCommunicator(rank, world_size, rendezvous)
