"""Sums and gathers over ranks through mailboxes: memory of each rank that all others can write to."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from vllm_triton.kernels import reduce as kernels
from vllm_triton.ops.launch import power_of_2
from vllm_triton.tuning import active

LANES = 528
"""Most rows on their way at a time: four programs on each of 132 multiprocessors."""

LANE_BYTES = 16 << 10
"""Of one row, or of one piece of a row that is gathered."""

MAX_RANKS = 8
PHASES = 3
EMPTY = -0x7FFF8000
"""The word of an empty mailbox; see `kernels.reduce`."""

SMALL_BYTES = 1 << 20
"""Most bytes that more than two ranks send each other whole: beyond, ways that send each other parts move fewer."""


def mailbox_bytes(world_size: int) -> int:
    """Memory of one rank: a slot for each rank and phase."""
    return PHASES * world_size * LANES * LANE_BYTES


@dataclass(slots=True, eq=False)
class Mailboxes:
    """One rank's view.

    `bases` int64 [W]: addresses of every rank's memory of `mailbox_bytes`, which all hold EMPTY words at the start.
    `stop` int32 [1] is memory of the host that the device reads: not 0 ends every wait.
    """

    rank: int
    world_size: int
    bases: Tensor
    stop: Tensor
    phases: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.phases = torch.zeros(LANES, dtype=torch.int32, device=self.bases.device)

    def sums(self, x: Tensor) -> bool:
        """Whether a sum of x [T,H] goes this way."""
        row_bytes = x.shape[1] * x.element_size()
        return x.is_contiguous() and not row_bytes % 4 and row_bytes <= LANE_BYTES and self._sends(x)

    def gathers(self, out: Tensor, x: Tensor) -> bool:
        """Whether gathering x [T,N] to out [T,M] goes this way."""
        return x.element_size() == 4 and x.is_contiguous() and out.is_contiguous() and self._sends(x)

    def _sends(self, x: Tensor) -> bool:
        return self.world_size == 2 or x.numel() * x.element_size() <= SMALL_BYTES


def all_reduce(x: Tensor, boxes: Mailboxes) -> None:
    """``x`` [T,H] = sum over ranks."""
    _sum(x, x, x, x, 0.0, boxes, norm=False)


def all_reduce_add_rms_norm(out: Tensor, residual: Tensor, x: Tensor, weight: Tensor, eps: float, boxes: Mailboxes) -> None:
    """``residual += sum of x over ranks; out = rms_norm(residual)``; all [T,H]."""
    _sum(out, residual, x, weight, eps, boxes, norm=True)


def all_gather(out: Tensor, x: Tensor, boxes: Mailboxes) -> None:
    """``out`` [T,M] = the first M columns of the ranks' ``x`` [T,N] side by side; elements of 32 bits."""
    rows, size = x.shape
    if not rows:
        return
    block = min(power_of_2(size), LANE_BYTES // 4)
    kernels.all_gather[(_lanes(rows * -(-size // block)),)](
        out.view(torch.int32),
        x.view(torch.int32),
        boxes.bases,
        boxes.phases,
        boxes.stop,
        rows,
        out.shape[1],
        LANES * LANE_BYTES // 4,
        LANE_BYTES // 4,
        RANK=boxes.rank,
        WORLD=boxes.world_size,
        SIZE=size,
        BLOCK=block,
        num_warps=_warps(block * 2),
        num_stages=1,
        **active().dependent,
    )


def _sum(out: Tensor, residual: Tensor, x: Tensor, weight: Tensor, eps: float, boxes: Mailboxes, *, norm: bool) -> None:
    rows, size = x.shape
    if not rows:
        return
    block = max(2, power_of_2(size))
    kernels.all_reduce[(_lanes(rows),)](
        out,
        residual,
        x,
        weight,
        eps,
        boxes.bases,
        boxes.phases,
        boxes.stop,
        rows,
        LANES * LANE_BYTES // 4,
        LANE_BYTES // 4,
        RANK=boxes.rank,
        WORLD=boxes.world_size,
        PACK=4 // x.element_size(),
        SIZE=size,
        BLOCK=block,
        NORM=norm,
        num_warps=_warps(block),
        num_stages=1,
        **active().dependent,
    )


def _lanes(count: int) -> int:
    return min(count, LANES)


def _warps(elements: int) -> int:
    """16 bytes of each row for a thread."""
    return max(1, min(16, elements // 256))
