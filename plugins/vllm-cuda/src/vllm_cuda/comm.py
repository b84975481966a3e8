"""The family ``comm``: memory of the peers where they can be reached, else NCCL."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from urllib.parse import urlsplit

import torch
from torch import Tensor

from vllm_core.api import UnsupportedError
from vllm_cuda import nccl
from vllm_cuda.driver import DriverError
from vllm_cuda.peer import open_mailboxes
from vllm_triton.ops import reduce
from vllm_triton.ops.norm import add_rms_norm

_POLL_S = 0.002
_handles = count(1)
_groups: dict[int, CudaCommunicator] = {}


class CudaCommunicator:
    """This process's end of a group of GPUs of one host."""

    def __init__(self, rank: int, world_size: int, rendezvous: str, device: torch.device) -> None:
        # This runs in a thread of its own, and the current device is a thread's.
        torch.cuda.set_device(device)
        self.rank, self.world_size = rank, world_size
        self._meeting = Path(urlsplit(rendezvous).path)
        (unique, *_) = self._exchange("nccl", nccl.new_id() if rank == 0 else b"")
        self.nccl = nccl.Group(rank, world_size, unique)
        self.mailboxes: reduce.Mailboxes | None = None
        self.without_mailboxes = ""
        self._stop: Callable[[], None] | None = None
        try:
            if world_size > reduce.MAX_RANKS:
                raise DriverError(f"{world_size} ranks, mailboxes are for {reduce.MAX_RANKS}")
            self.mailboxes, self._stop = open_mailboxes(rank, world_size, lambda mine: self._exchange("memory", mine))
        except (DriverError, OSError) as error:
            self.without_mailboxes = str(error)
        self.handle = next(_handles)
        _groups[self.handle] = self

    def close(self) -> None:
        """End every wait for ranks that are gone, and forget the group; a second call does nothing."""
        if _groups.pop(self.handle, None) is None:
            return
        if self._stop is not None:
            self._stop()
        self.nccl.abort()

    def _exchange(self, what: str, mine: bytes) -> list[bytes]:
        """Every rank's bytes, through files beside the meeting point."""
        own = self._file(what, self.rank)
        fresh = own.with_suffix(".new")
        fresh.write_bytes(mine)
        os.replace(fresh, own)
        return [self._await(self._file(what, rank)) for rank in range(self.world_size)]

    def _file(self, what: str, rank: int) -> Path:
        return self._meeting.with_name(f"{self._meeting.name}-{what}-{rank}")

    def _await(self, path: Path) -> bytes:
        while not path.exists():
            # The folder goes when the group is given up.
            if not path.parent.exists():
                raise FileNotFoundError(path.parent)
            time.sleep(_POLL_S)
        return path.read_bytes()


def all_reduce(x: Tensor, group: int) -> None:
    """``x`` = sum over ranks."""
    if group:
        _groups[group].nccl.all_reduce(x)


def all_gather(out: Tensor, x: Tensor, group: int) -> None:
    """``out[T,M]`` = the first M columns of the ranks' ``x[T,N]`` side by side."""
    if not group:
        out.copy_(x[:, : out.shape[1]])
        return
    members = _groups[group].nccl
    parts = x.new_empty(members.world_size, *x.shape)
    members.all_gather(parts, x.contiguous())
    width = x.shape[1]
    for index, part in enumerate(parts):
        columns = out[:, index * width : (index + 1) * width]
        columns.copy_(part[:, : columns.shape[1]])


def reduce_scatter(out: Tensor, x: Tensor, group: int) -> None:
    """``out`` = this rank's rows of the sum over ranks."""
    if group:
        _groups[group].nccl.reduce_scatter(out, x.contiguous())
    else:
        out.copy_(x)


def all_reduce_add_rms_norm(out: Tensor, residual: Tensor, x: Tensor, weight: Tensor, eps: float, group: int) -> None:
    """`all_reduce` of x, then `add_rms_norm`."""
    all_reduce(x, group)
    add_rms_norm(out, residual, x, weight, eps)


def peer_all_reduce(x: Tensor, group: int) -> None:
    """`all_reduce` through the peers' memory. Raises UnsupportedError where that cannot be reached."""
    boxes = _mailboxes(group)
    if boxes is not None and boxes.sums(x):
        reduce.all_reduce(x, boxes)
    else:
        all_reduce(x, group)


def peer_all_gather(out: Tensor, x: Tensor, group: int) -> None:
    """`all_gather` through the peers' memory. Raises UnsupportedError where that cannot be reached."""
    boxes = _mailboxes(group)
    if boxes is not None and boxes.gathers(out, x):
        reduce.all_gather(out, x, boxes)
    else:
        all_gather(out, x, group)


def peer_all_reduce_add_rms_norm(out: Tensor, residual: Tensor, x: Tensor, weight: Tensor, eps: float, group: int) -> None:
    """`all_reduce_add_rms_norm`, in one kernel. Raises UnsupportedError where peers cannot be reached."""
    boxes = _mailboxes(group)
    if boxes is not None and boxes.sums(x):
        reduce.all_reduce_add_rms_norm(out, residual, x, weight, eps, boxes)
    else:
        all_reduce_add_rms_norm(out, residual, x, weight, eps, group)


def _mailboxes(group: int) -> reduce.Mailboxes | None:
    """The mailboxes of a group; None for a rank alone."""
    if not group:
        return None
    members = _groups[group]
    if members.mailboxes is None:
        raise UnsupportedError(
            "Memory of the peers cannot be reached",
            on=f"rank {members.rank} of {members.world_size}",
            found=members.without_mailboxes,
            expected="GPUs of one host that map each other's memory",
            fix="--deny-provider vllm-cuda-peer; sums then go through NCCL",
        )
    return members.mailboxes
