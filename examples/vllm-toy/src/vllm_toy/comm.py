"""Collectives between processes, each with a device: the device's link is simulated by gloo, over its memory."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from itertools import count
from typing import Any
from urllib.parse import urlsplit

from torch import Tensor, distributed

from vllm_toy.runtime import device_of, launch_on

TIMEOUT = timedelta(minutes=5)
_gloo: Any = distributed.ProcessGroupGloo
_store: Any = distributed.FileStore  # type: ignore[attr-defined] # torch documents both classes and types neither
_handles = count(1)
_groups: dict[int, Any] = {}


class ToyCommunicator:
    """Ranks that found each other through a file; a group of its own beside torch's default one."""

    def __init__(self, rank: int, world_size: int, rendezvous: str) -> None:
        self.rank, self.world_size = rank, world_size
        options = _gloo._Options()
        options._devices = [_gloo.create_device(hostname="127.0.0.1")]
        options._timeout = TIMEOUT
        group = _gloo(_store(urlsplit(rendezvous).path, world_size), rank, world_size, options)
        self.handle = next(_handles)
        _groups[self.handle] = group

    def close(self) -> None:
        """Forget the group. What waits for a rank that is gone fails, because its connection has ended."""
        _groups.pop(self.handle, None)


def collective(body: Callable[..., None]) -> Callable[..., None]:
    """Launch ``body`` with the group behind the handle. The others wait for it, so the device does not put it off."""

    def launch(*arguments: Any) -> None:
        *tensors, handle = arguments
        group = _groups[handle] if handle else None
        launch_on(device_of(body.__name__, tuple(tensors)), body, (*tensors, group), urgent=group is not None)

    return launch


@collective
def all_reduce(x: Tensor, group: Any) -> None:
    """``x[T,H]`` = sum over ranks."""
    if group is not None:
        whole = x.contiguous()
        group.allreduce([whole]).wait()
        x.copy_(whole)


@collective
def all_gather(out: Tensor, x: Tensor, group: Any) -> None:
    """``out[T,M]`` = the first M columns of the ranks' ``x[T,N]`` side by side."""
    parts = [x.clone()]
    if group is not None:
        parts = [x.new_empty(x.shape) for _ in range(group.size())]
        group.allgather([parts], [x.contiguous()]).wait()
    for index, part in enumerate(parts):
        columns = out[:, index * x.shape[1] : (index + 1) * x.shape[1]]
        columns.copy_(part[:, : columns.shape[1]])


@collective
def reduce_scatter(out: Tensor, x: Tensor, group: Any) -> None:
    """``out`` = this rank's rows of the sum over ranks."""
    total, rank = x.clone(), 0
    if group is not None:
        group.allreduce([total]).wait()
        rank = group.rank()
    out.copy_(total[rank * len(out) : (rank + 1) * len(out)])
