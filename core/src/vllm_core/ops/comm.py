"""References: the family ``comm`` over torch.distributed.

Handle 0 is the group of this rank alone: every op is the identity. Other handles come from `register`.
"""

from __future__ import annotations

import torch
from torch import Tensor, distributed

ALONE = 0
_groups: list[distributed.ProcessGroup | None] = [None]


def register(group: distributed.ProcessGroup) -> int:
    """Return a handle for ``group``, valid in this process."""
    _groups.append(group)
    return len(_groups) - 1


def all_reduce(x: Tensor, group: int) -> None:
    """``x`` = sum over ranks."""
    if group != ALONE:
        distributed.all_reduce(x, group=_groups[group])


def all_gather(out: Tensor, x: Tensor, group: int) -> None:
    """``out`` = concatenation over ranks along the last dimension."""
    if group == ALONE:
        out.copy_(x)
        return
    parts = [torch.empty_like(x) for _ in range(distributed.get_world_size(_groups[group]))]
    distributed.all_gather(parts, x.contiguous(), group=_groups[group])
    torch.cat(parts, dim=-1, out=out)


def reduce_scatter(out: Tensor, x: Tensor, group: int) -> None:
    """``out`` = this rank's rows of the sum over ranks."""
    if group == ALONE:
        out.copy_(x)
        return
    total = x.clone()
    distributed.all_reduce(total, group=_groups[group])
    rank = distributed.get_rank(_groups[group])
    out.copy_(total[rank * out.shape[0] : (rank + 1) * out.shape[0]])
