"""References: the family ``comm`` over torch.distributed.

Handle 0 is the group of this rank alone: every op is the identity. Others are those of communicators that show their
process group (`adopt`), or come from `register`.

Threads of a process group end with its last reference, and must have before the interpreter does: one that frees a tensor
later ends the process by `std::terminate`. So an op holds its group while it waits, and `leave` lets go of it.
"""

from __future__ import annotations

import torch
from torch import Tensor, distributed

from vllm_core.api import Communicator
from vllm_core.errors import UnsupportedError
from vllm_core.ops.norm import add_rms_norm

ALONE = 0
_groups: dict[int, distributed.ProcessGroup] = {}


def adopt(handle: int, group: distributed.ProcessGroup) -> None:
    """Let the references of this process find ``group`` under a communicator's handle."""
    _groups[handle] = group


def forget(handle: int) -> None:
    """Drop a group whose communicator was closed; an unknown one is no error."""
    _groups.pop(handle, None)


def enter(communicator: Communicator) -> None:
    """Let the references of this process find a communicator's group, if it shows one."""
    group = getattr(communicator, "process_group", None)
    if group is not None:
        adopt(communicator.handle, group)


def leave(communicator: Communicator) -> None:
    """Close a communicator, and let its group go; a second call does nothing."""
    forget(communicator.handle)
    communicator.close()


def register(group: distributed.ProcessGroup) -> int:
    """Return a fresh handle for ``group``, valid in this process."""
    handle = max(_groups, default=ALONE) + 1
    adopt(handle, group)
    return handle


def all_reduce(x: Tensor, group: int) -> None:
    """``x`` = sum over ranks."""
    if group != ALONE:
        found = _find(group)
        found.allreduce([x]).wait()


def all_gather(out: Tensor, x: Tensor, group: int) -> None:
    """``out`` = concatenation over ranks along the last dimension, cut to its width."""
    if group == ALONE:
        out.copy_(x[:, : out.shape[1]])
        return
    found = _find(group)
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(found.size())]
    found.allgather([parts], [x.contiguous()]).wait()
    out.copy_(torch.cat(parts, dim=-1)[:, : out.shape[1]])


def reduce_scatter(out: Tensor, x: Tensor, group: int) -> None:
    """``out`` = this rank's rows of the sum over ranks."""
    if group == ALONE:
        out.copy_(x)
        return
    found, total = _find(group), x.clone()
    found.allreduce([total]).wait()
    begin = found.rank() * out.shape[0]
    out.copy_(total[begin : begin + out.shape[0]])


def all_reduce_add_rms_norm(out: Tensor, residual: Tensor, x: Tensor, weight: Tensor, eps: float, group: int) -> None:
    """The decomposition: `all_reduce`, then `add_rms_norm`."""
    all_reduce(x, group)
    add_rms_norm(out, residual, x, weight, eps)


def _find(handle: int) -> distributed.ProcessGroup:
    group = _groups.get(handle)
    if group is None:
        raise UnsupportedError(
            "Communicator has no process group",
            on=f"references of the family comm, handle {handle}",
            found="a communicator of the platform's own kind",
            expected="one that shows a torch.distributed process group",
            fix="use the platform's own ops of this family: no --provider for them",
        )
    return group
