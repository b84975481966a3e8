"""A `Communicator` over one of torch's process groups: NCCL's interface, or another library with a backend in torch.

The ops of the family ``comm`` are core's, which run over any communicator that shows its process group.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from itertools import count
from typing import Any
from urllib.parse import urlsplit

from torch import distributed

from vllm_core.api import UnsupportedError

TIMEOUT = timedelta(minutes=5)
"""How long a rank waits for another in one op: far longer than ranks of one step ever differ."""

_handles = count(1)
_store: Any = distributed.FileStore  # type: ignore[attr-defined] # torch documents it and does not type it


class GroupCommunicator:
    """A group of its own: torch's default group, which may be the user's, is left alone.

    `backend` is the name of torch's class, or makes a group of (store, rank, world size, timeout). Raises UnsupportedError
    where this torch was built without that class.
    """

    def __init__(self, backend: str | Callable[..., Any], rank: int, world_size: int, rendezvous: str) -> None:
        kind = getattr(distributed, backend, None) if isinstance(backend, str) else backend
        if kind is None:
            raise UnsupportedError(
                "This torch has no collectives for the device",
                on=f"rank {rank} of {world_size}",
                found=f"torch.distributed without {backend}",
                expected="the torch build of the platform, with its collectives",
                fix="install that build of torch, or run without --tensor-parallel-size",
            )
        self.rank, self.world_size = rank, world_size
        store = _store(urlsplit(rendezvous).path, world_size)
        self.process_group: Any = self._join(kind, store)
        self.handle = next(_handles)

    def _join(self, kind: Any, store: Any) -> Any:
        if "Options" not in vars(kind):
            return kind(store, self.rank, self.world_size, TIMEOUT)
        options = kind.Options()
        options._timeout = TIMEOUT
        return kind(store, self.rank, self.world_size, options)

    def close(self) -> None:
        """End every wait for ranks that are gone; a second call does nothing."""
        group, self.process_group = self.process_group, None
        if group is not None and hasattr(group, "abort"):
            group.abort()
