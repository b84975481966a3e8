"""The `Device`: everything that core ever asks of hardware outside ops.

Imports no torch at run time. An engine has one instance, made by the chosen plugin's `create_device`; a process may have
several engines, one after the other in one thread (`Device.make_current`). Sizes are bytes, times are seconds. All methods
are called from the engine's thread unless they say otherwise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from vllm_core.api.manifest import DeviceFacts

if TYPE_CHECKING:
    import torch

Pool = Literal["weights", "kv", "state", "workspace", "graph"]
POOLS: tuple[Pool, ...] = ("weights", "kv", "state", "workspace", "graph")


@dataclass(frozen=True, slots=True)
class Eager:
    """Where references may run: on every op, on the named ones, or nowhere."""

    kind: Literal["full", "partial", "none"]
    ops: frozenset[str] = frozenset()

    def allows(self, op: str) -> bool:
        """Whether the reference of ``op`` may run on this device."""
        return self.kind == "full" or (self.kind == "partial" and op in self.ops)


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """Memory of the device now. `own_bytes` counts this process's allocations through the Device, by pool."""

    total_bytes: int
    available_bytes: int
    own_bytes: Mapping[Pool, int]
    peak_own_bytes: int


class Event(Protocol):
    """A point in a stream's order of work."""

    def record(self) -> None:
        """Mark the current point of the current stream."""

    def wait(self) -> None:
        """Block the host until the point is reached."""

    def query(self) -> bool:
        """Whether the point has been reached."""


class Graph(Protocol):
    """Work captured once; `replay` repeats it on the same addresses."""

    def replay(self) -> None:
        """Launch the captured work."""


class Communicator(Protocol):
    """A group of ranks; ops of the family ``comm`` receive its handle, a number that the provider chooses, never 0.

    One that can be had as a torch.distributed ProcessGroup may show it as an attribute ``process_group``: core's references
    of the family then run over it.
    """

    rank: int
    world_size: int
    handle: int

    def close(self) -> None:
        """Leave the group, without waiting for its other ranks, which may be gone.

        May be called from another thread while an op waits for such a rank: the op should then end, by raising or with
        values that nobody will read. A second call does nothing.
        """


class Device(ABC):
    """Memory, order of work, capture and facts of one device.

    Promises to core: allocations are aligned to at least 64 bytes and zero-filled; a released pool's tensors are
    not touched until restored; with `stable_addresses` a restored pool has its old addresses; `statistics` never
    counts another process.
    """

    facts: DeviceFacts
    torch_device: str
    """What torch calls it, as a string; opaque to core."""
    eager: Eager
    asynchronous: bool
    """Whether work is queued, so that the host may run ahead."""
    stable_addresses: bool
    supports_graphs: bool
    recorded_rows: int | None = None
    """Of a device whose `capture` runs the work and notes its calls, as a host does: the most rows of a decode step that are
    worth it, each number captured for itself, since a row of padding takes as long as any other. None: capturing runs nothing,
    and steps are padded to a few numbers of rows."""

    @abstractmethod
    def allocate(self, pool: Pool, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a zero-filled, contiguous tensor from ``pool``. Raises MemoryBudgetError."""

    @abstractmethod
    def adopt(self, pool: Pool, host: torch.Tensor) -> torch.Tensor:
        """Return ``host``'s values on the device, counted in ``pool``; may share memory where device is host."""

    @abstractmethod
    def release(self, pool: Pool) -> int:
        """Give the memory of ``pool`` back; returns the bytes released."""

    @abstractmethod
    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a host tensor from which copies are as fast as the device allows."""

    @abstractmethod
    def statistics(self) -> MemoryStats:
        """Memory now."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block until all queued work is done; raises what that work raised."""

    @abstractmethod
    def event(self) -> Event:
        """Return a new event on the engine's stream."""

    @abstractmethod
    def seed(self, value: int) -> None:
        """Seed the device's own generator (weights of load format ``dummy``)."""

    def capture(self, work: Callable[[], None]) -> Graph:
        """Capture ``work`` for replay. Raises UnsupportedError unless `supports_graphs`, and for work that cannot be."""
        raise self._unsupported("graph capture", "supports_graphs")

    def bind(self, op: Callable[..., Any], provider: str) -> Callable[..., Any]:
        """What core calls for ``op`` of ``provider``, asked once for each call site: the default is the op itself.

        A device whose graphs do not see all that an op does has here the place to note the op's call instead.
        """
        return op

    def rehearsal(self, providers: frozenset[str]) -> AbstractContextManager[object] | None:
        """A context in which ops run nothing, and after which what they would have launched is ready: compiled, all at once.

        Inside, outputs stay as they are (zeros, in new memory of this Device), and `capture` returns a graph that does nothing.
        ``providers`` are those whose ops will be called. Returns None, the default, where there is nothing to gain, or where
        one of them would really run.
        """
        return None

    def offload(self, pool: Pool) -> int:
        """`release`, with the contents moved to the host until `restore`.

        Raises MemoryBudgetError, with nothing moved, where the host has no memory for them; UnsupportedError unless the claim
        ``sleep`` is available.
        """
        raise self._unsupported(f"moving pool {pool!r} to the host", "sleep")

    def restore(self, pool: Pool) -> None:
        """Bring a released pool back: the same tensors, with their contents after `offload`, else zeros.

        Nothing happens to a pool that is there.
        Raises MemoryBudgetError where the memory is no longer there, UnsupportedError unless the claim ``sleep`` is available.
        """
        raise self._unsupported(f"restoring pool {pool!r}", "sleep")

    def copy_to_peer(self, tensor: torch.Tensor, peer: Device) -> torch.Tensor:
        """Copy to another device of this type. Raises UnsupportedError unless ``peer_copy`` is claimed."""
        raise self._unsupported("peer copy", "peer_copy")

    def copy_into_peer(self, source: torch.Tensor, target: torch.Tensor, peer: Device) -> None:
        """`copy_to_peer` into memory that is there: ``target`` of ``peer`` has the shape and dtype of ``source``.

        Both are contiguous. Work queued before on either device comes before the copy, and later work after it.
        The default copies twice.
        """
        target.copy_(self.copy_to_peer(source, peer))

    def make_current(self) -> None:
        """Let the calling thread use this device: another one of the process may have been used in it before.

        The default does nothing.
        """
        return

    def communicator(self, rank: int, world_size: int, rendezvous: str) -> Communicator:
        """Join a group of ranks, one per process, each with a Device of this type; returns when all have joined.

        ``rendezvous`` is a ``file://`` URL in a private folder of this host, the same for all ranks and new for every group;
        torch.distributed takes it as `init_method`. Called before the first op, in a thread of its own, since another rank may
        never come. Raises UnsupportedError unless ``parallel.tensor`` is claimed.
        """
        raise self._unsupported("communicator", "parallel.tensor")

    def _unsupported(self, what: str, claim: str) -> Exception:
        from vllm_core.errors import UnsupportedError

        return UnsupportedError(
            f"{what} is not available",
            on=f"{self.facts.name} ({self.facts.device_type})",
            found=f"the platform's claim {claim!r} is absent",
            expected=f"a device whose platform claims {claim!r}",
            fix="choose another platform, or turn the option off that asked for it",
        )
