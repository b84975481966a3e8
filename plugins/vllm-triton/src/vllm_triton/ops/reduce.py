"""Sums over ranks through mailboxes: memory of each rank that all others can write to."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from vllm_triton.kernels import reduce as kernels
from vllm_triton.ops.launch import power_of_2
from vllm_triton.tuning import active

ROWS = 512
"""Most rows of one sum."""

MAX_RANKS = 8
HEAD_BYTES = 4 * ROWS * MAX_RANKS
"""Flags, before the slots: int32 [MAX_RANKS, ROWS], by the rank that raises them."""


@dataclass(frozen=True, eq=False)
class Mailboxes:
    """One rank's view. `bases` int64 [W]: addresses of every rank's memory, each HEAD_BYTES of flags and 2 W slots.

    `stop` int32 [1] is memory of the host that the device reads: not 0 ends every wait.
    """

    rank: int
    world_size: int
    slot_bytes: int
    bases: Tensor
    stop: Tensor
    epochs: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "epochs", torch.zeros(ROWS, dtype=torch.int32, device=self.bases.device))

    def takes(self, x: Tensor) -> bool:
        """Whether a sum of x [T,H] goes this way."""
        return x.shape[0] <= ROWS and x.numel() * x.element_size() <= self.slot_bytes and x.is_contiguous()


def all_reduce(x: Tensor, boxes: Mailboxes) -> None:
    """``x`` [T,H] = sum over ranks."""
    _launch(x, x, x, x, 0.0, boxes, norm=False)


def all_reduce_add_rms_norm(out: Tensor, residual: Tensor, x: Tensor, weight: Tensor, eps: float, boxes: Mailboxes) -> None:
    """``residual += sum of x over ranks; out = rms_norm(residual)``; all [T,H]."""
    _launch(out, residual, x, weight, eps, boxes, norm=True)


def _launch(out: Tensor, residual: Tensor, x: Tensor, weight: Tensor, eps: float, boxes: Mailboxes, *, norm: bool) -> None:
    rows, size = x.shape
    if not rows:
        return
    block = power_of_2(size)
    kernels.all_reduce[(rows,)](
        out,
        residual,
        x,
        weight,
        eps,
        boxes.bases,
        boxes.epochs,
        boxes.stop,
        boxes.slot_bytes // x.element_size(),
        RANK=boxes.rank,
        WORLD=boxes.world_size,
        ROWS=ROWS,
        HEAD_BYTES=HEAD_BYTES,
        SIZE=size,
        BLOCK=block,
        NORM=norm,
        num_warps=max(1, min(16, block // 256)),
        **active().dependent,
    )
