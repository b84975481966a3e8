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
PHASES = 3
EMPTY = {4: -(1 << 31), 2: -0x7FFF8000}
"""The word of an empty mailbox, by bytes of an element: minus zero, once or twice."""


def mailbox_bytes(world_size: int, slot_bytes: int) -> int:
    """Memory of one rank: a slot for each rank and phase."""
    return PHASES * world_size * slot_bytes


@dataclass(slots=True, eq=False)
class Mailboxes:
    """One rank's view, for sums of tensors whose elements have `item_bytes` (2 or 4) and whose rows are as wide as the first.

    `bases` int64 [W]: addresses of every rank's memory of `mailbox_bytes`, which all hold EMPTY words at the start.
    `stop` int32 [1] is memory of the host that the device reads: not 0 ends every wait.
    """

    rank: int
    world_size: int
    slot_bytes: int
    item_bytes: int
    bases: Tensor
    stop: Tensor
    width: int = 0
    epochs: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.epochs = torch.zeros(ROWS, dtype=torch.int32, device=self.bases.device)

    def takes(self, x: Tensor) -> bool:
        """Whether a sum of x [T,H] goes this way. Rows of another width would lie across those that are there."""
        rows, width = x.shape
        if rows > ROWS or rows * width * self.item_bytes > self.slot_bytes or width % 2 or not x.is_contiguous():
            return False
        self.width = self.width or width
        return width == self.width


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
    block = max(2, power_of_2(size))
    kernels.all_reduce[(rows,)](
        out,
        residual,
        x,
        weight,
        eps,
        boxes.bases,
        boxes.epochs,
        boxes.stop,
        boxes.slot_bytes // 4,
        RANK=boxes.rank,
        WORLD=boxes.world_size,
        EMPTY=EMPTY[boxes.item_bytes],
        PACK=4 // boxes.item_bytes,
        SIZE=size,
        BLOCK=block,
        NORM=norm,
        num_warps=max(1, min(16, block // 256)),
        **active().dependent,
    )
