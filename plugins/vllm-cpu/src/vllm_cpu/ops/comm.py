"""Collectives between processes of one host, over torch's gloo. Oracle: `vllm_core.ops.comm`."""

from __future__ import annotations

from datetime import timedelta
from itertools import count
from typing import Any
from urllib.parse import urlsplit

from torch import Tensor, distributed

from vllm_cpu.recording import recorded

TIMEOUT = timedelta(minutes=5)
"""How long a rank waits for another in one op: far longer than ranks of one step ever differ."""

_LOOPBACK = "127.0.0.1"
_handles = count(1)
_groups: dict[int, Any] = {}
_gloo: Any = distributed.ProcessGroupGloo
_store: Any = distributed.FileStore  # type: ignore[attr-defined] # torch documents both classes and types neither


class GlooCommunicator:
    """A gloo group of its own: torch's default group, which may be the user's, is left alone."""

    def __init__(self, rank: int, world_size: int, rendezvous: str) -> None:
        self.rank, self.world_size = rank, world_size
        options = _gloo._Options()
        options._devices = [_gloo.create_device(hostname=_LOOPBACK)]
        options._timeout = TIMEOUT
        store = _store(urlsplit(rendezvous).path, world_size)
        self.process_group: Any = _gloo(store, rank, world_size, options)
        self.handle = next(_handles)
        _groups[self.handle] = self.process_group

    def close(self) -> None:
        """Forget the group, whose threads end with its last reference, which an op that waits has until it ends.

        What waits for a rank that is gone fails by itself, because its connection has ended.
        """
        _groups.pop(self.handle, None)
        self.process_group = None


@recorded
def all_reduce(x: Tensor, group: int) -> None:
    """``x`` = sum over ranks; every element is summed by one of them, so that all have the same bits."""
    if group:
        members = _groups[group]
        members.allreduce([x]).wait()


@recorded
def all_gather(out: Tensor, x: Tensor, group: int) -> None:
    """``out[T,M]`` = the first M columns of the ranks' ``x[T,N]`` side by side."""
    if not group:
        out.copy_(x[:, : out.shape[1]])
        return
    members = _groups[group]
    parts = x.new_empty(members.size(), *x.shape)
    members.allgather([list(parts.unbind())], [x.contiguous()]).wait()
    width = x.shape[1]
    for index, part in enumerate(parts):
        columns = out[:, index * width : (index + 1) * width]
        columns.copy_(part[:, : columns.shape[1]])


@recorded
def reduce_scatter(out: Tensor, x: Tensor, group: int) -> None:
    """``out`` = this rank's rows of the sum over ranks."""
    if not group:
        out.copy_(x)
        return
    members, total = _groups[group], x.clone()
    members.allreduce([total]).wait()
    begin = members.rank() * len(out)
    out.copy_(total[begin : begin + len(out)])
