"""A GPU as a `Device`: memory by pool, events, graphs, copies through pinned memory."""

from __future__ import annotations

import math
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from vllm_core.api import POOLS, Communicator, Device, DeviceFacts, Eager, Event, Graph, MemoryBudgetError, MemoryStats, Pool
from vllm_cuda.backends.offers import OWN

STAGING_BYTES = 64 << 20
"""Pinned memory through which weights travel: two such buffers, one filled while the other is copied."""

_LAUNCHER = "triton.backends.nvidia.driver:CudaLauncher"
"""What starts a kernel; some versions of Triton compile it for each signature."""


class _Event:
    """A point in the engine's stream."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = torch.cuda.Event()

    def record(self) -> None:
        """Mark the current point."""
        self._event.record()

    def wait(self) -> None:
        """Block until it is reached."""
        self._event.synchronize()

    def query(self) -> bool:
        """Whether it is reached."""
        return bool(self._event.query())


class _NoGraph:
    """What is captured in a rehearsal."""

    def replay(self) -> None:
        """Do nothing."""


class _Storage:
    """The memory of a tensor, which this does not keep; views that outlive the tensor do."""

    def __init__(self, tensor: Tensor) -> None:
        self._weak: Any = StorageWeakRef(tensor.untyped_storage())

    def is_of(self, tensor: Tensor) -> bool:
        """Whether it is that tensor's."""
        return bool(self._weak.cdata == tensor.untyped_storage()._cdata)

    def get(self) -> torch.UntypedStorage | None:
        """The storage, while some tensor has it."""
        found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self._weak.cdata)
        return found


@dataclass(frozen=True, slots=True)
class _Away:
    """A storage whose memory was given back: its bytes, and what was in them, if that was kept."""

    storage: _Storage
    size_bytes: int
    host: Tensor | None


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all captures: on each new one cuBLAS would take a workspace of its own, and keep it."""
    return torch.cuda.Stream(device)


def host_available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """What the host can give without swapping, its page cache included (proc(5), MemAvailable); 0 where it does not say."""
    try:
        text = meminfo.read_text("ascii")
    except OSError:
        return 0
    found = re.search(r"^MemAvailable:\s*(\d+) kB$", text, re.MULTILINE)
    return int(found[1]) << 10 if found else 0


class CudaDevice(Device):
    """One GPU, through torch's allocator. A pool's bytes count from allocation until the pool is released."""

    eager = Eager("full")
    asynchronous = True
    stable_addresses = False
    supports_graphs = True

    def __init__(self, facts: DeviceFacts) -> None:
        self.facts = facts
        self.torch_device = f"cuda:{facts.properties.get('index', '0')}"
        self._device = torch.device(self.torch_device)
        self.make_current()
        self._own: dict[Pool, int] = dict.fromkeys(POOLS, 0)
        self._held: dict[Pool, list[_Storage]] = {pool: [] for pool in POOLS}
        self._away: dict[Pool, list[_Away]] = {pool: [] for pool in POOLS}
        self._peak = 0
        self._staging: list[tuple[Tensor, torch.cuda.Event]] = []
        self._graph_pool: Any = None
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        self._rehearsing = False

    def allocate(self, pool: Pool, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a zero-filled tensor. Raises MemoryBudgetError."""
        size = math.prod(shape) * dtype.itemsize
        try:
            tensor = torch.zeros(tuple(shape), dtype=dtype, device=self._device)
        except torch.cuda.OutOfMemoryError as error:
            raise self._short(pool, size) from error
        self._count(pool, size, tensor)
        return tensor

    def adopt(self, pool: Pool, host: Tensor) -> Tensor:
        """Copy a host tensor to the GPU through pinned memory; one that is there is counted. Raises MemoryBudgetError."""
        size, there = host.numel() * host.element_size(), host.device == self._device
        if there and any(one.is_of(host) for one in self._held[pool]):
            return host
        try:
            if there:
                # A part would keep the whole that it was cut from.
                target = host if host.untyped_storage().nbytes() == size else host.clone()
            else:
                target = torch.empty(host.shape, dtype=host.dtype, device=self._device)
        except torch.cuda.OutOfMemoryError as error:
            raise self._short(pool, size) from error
        if not there:
            self._upload(target.view(-1).view(torch.uint8), host.contiguous().view(-1).view(torch.uint8))
        self._count(pool, size, target)
        return target

    def _upload(self, target: Tensor, source: Tensor) -> None:
        """Copy bytes in pieces: the host fills one buffer while the other is on its way."""
        if not self._staging:
            self._staging = [
                (torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()) for _ in range(2)
            ]
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

    def _count(self, pool: Pool, size: int, tensor: Tensor) -> None:
        self._own[pool] += size
        self._held[pool].append(_Storage(tensor))
        self._peak = max(self._peak, sum(self._own.values()))

    def release(self, pool: Pool) -> int:
        """Give the pool's memory back, also that of tensors which somebody still holds: `restore` brings them back."""
        return self._give_back(pool, keep=False)

    def offload(self, pool: Pool) -> int:
        """Give the pool's memory back; the contents wait in pinned memory of the host.

        Raises MemoryBudgetError, with nothing given back, where the host has too little of that.
        """
        return self._give_back(pool, keep=True)

    def _give_back(self, pool: Pool, *, keep: bool) -> int:
        away = []
        for reference in self._held[pool]:
            storage = reference.get()
            if storage is not None and storage.nbytes():
                away.append(_Away(reference, storage.nbytes(), self._kept(pool, storage) if keep else None))
        torch.cuda.synchronize(self._device)
        self._away[pool] += away
        self._drop(away)
        self._held[pool].clear()
        size, self._own[pool] = self._own[pool], 0
        return size

    def _kept(self, pool: Pool, storage: torch.UntypedStorage) -> Tensor:
        """Pinned memory with a storage's bytes, once the copy to it has ended. Raises MemoryBudgetError."""
        try:
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            raise MemoryBudgetError(
                "Not enough pinned memory on the host",
                on=f"pool {pool!r} of {self.facts.name}, {self._own[pool]} bytes",
                found=str(error).splitlines()[0],
                expected=f"{storage.nbytes()} bytes more",
                fix="give this machine or container more memory, or stop the engine instead",
            ) from error
        host.copy_(self._bytes_of(storage), non_blocking=True)
        return host

    def restore(self, pool: Pool) -> None:
        """Bring the tensors of a released pool back, at other addresses. Raises MemoryBudgetError, with none of them back."""
        away = self._away[pool]
        try:
            for one in away:
                storage = one.storage.get()
                if storage is not None:
                    storage.resize_(one.size_bytes)
        except torch.cuda.OutOfMemoryError as error:
            self._drop(away)
            raise self._short(pool, sum(one.size_bytes for one in away)) from error
        for one in away:
            storage = one.storage.get()
            if storage is not None:
                target = self._bytes_of(storage)
                target.zero_() if one.host is None else target.copy_(one.host, non_blocking=True)
                self._own[pool] += one.size_bytes
                self._held[pool].append(one.storage)
        torch.cuda.synchronize(self._device)
        self._away[pool] = []

    def _drop(self, away: Sequence[_Away]) -> None:
        for one in away:
            storage = one.storage.get()
            if storage is not None:
                storage.resize_(0)
        torch.cuda.empty_cache()

    def _bytes_of(self, storage: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Page-locked host memory."""
        return torch.zeros(tuple(shape), dtype=dtype, pin_memory=True)

    def statistics(self) -> MemoryStats:
        """Memory of the whole GPU, and of this process by pool."""
        available, total = torch.cuda.mem_get_info(self._device)
        if self.facts.memory_kind == "unified":
            # The driver counts the page cache as taken, and the host gives it up when memory is asked for.
            available = min(total, max(available, host_available_bytes()))
        unused = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return MemoryStats(
            total_bytes=total,
            available_bytes=available + unused,
            own_bytes=dict(self._own),
            peak_own_bytes=self._peak,
        )

    def synchronize(self) -> None:
        """Wait for all queued work."""
        torch.cuda.synchronize(self._device)

    def event(self) -> Event:
        """Return an event on the engine's stream."""
        return _Event()

    def seed(self, value: int) -> None:
        """Seed the GPU's generator."""
        torch.cuda.manual_seed(value)

    def capture(self, work: Callable[[], None]) -> Graph:
        """Capture ``work`` into a CUDA graph; graphs share one memory pool, since they replay one after the other."""
        if self._rehearsing:
            work()
            return _NoGraph()
        if not self._graphs:
            # The pool goes with the last graph that uses it, and its name with the pool.
            self._graph_pool = torch.cuda.graph_pool_handle()
        stream, graph = _capture_stream(self._device), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=self._graph_pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        self._graphs.add(graph)
        return graph

    def rehearsal(self, providers: frozenset[str]) -> AbstractContextManager[object] | None:
        """Kernels of this package are compiled side by side; others' would run."""
        from vllm_triton import ahead

        return self._rehearse() if providers and providers <= OWN and ahead.possible() else None

    @contextmanager
    def _rehearse(self) -> Iterator[None]:
        from vllm_cuda import programs
        from vllm_triton import ahead

        self._rehearsing = True
        try:
            with ahead.rehearsal(_LAUNCHER), programs.rehearsal():
                yield
        finally:
            self._rehearsing = False

    def communicator(self, rank: int, world_size: int, rendezvous: str) -> Communicator:
        """Join a group over NCCL, with memory of the peers where they can be reached."""
        from vllm_cuda.comm import CudaCommunicator

        return CudaCommunicator(rank, world_size, rendezvous, self._device)

    def make_current(self) -> None:
        """The current device is a thread's."""
        torch.cuda.set_device(self._device)

    def copy_to_peer(self, tensor: Tensor, peer: Device) -> Tensor:
        """Copy to another GPU: directly where the two reach each other, through pinned memory where not."""
        target = torch.empty(tensor.shape, dtype=tensor.dtype, device=peer.torch_device)
        self.copy_into_peer(tensor, target, peer)
        return target

    def copy_into_peer(self, source: Tensor, target: Tensor, peer: Device) -> None:
        """`copy_to_peer` into memory that is there."""
        from vllm_cuda.peer import why_not_direct

        assert isinstance(peer, CudaDevice), "another platform's device"
        if not why_not_direct(self._device, peer._device):
            target.copy_(source, non_blocking=True)
            return
        host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        host.copy_(source)
        target.copy_(host)
