"""Rows of a table, by torch's own op on the NPU."""

from __future__ import annotations

import torch
from torch import Tensor


def embedding(out: Tensor, ids: Tensor, weight: Tensor, scale: float) -> None:
    """``out[T,H] = weight[ids] * scale``."""
    torch.index_select(weight, 0, ids, out=out)
    if scale != 1.0:
        out.mul_(scale)


def gather_rows(out: Tensor, x: Tensor, rows: Tensor) -> None:
    """``out[R,H] = x[rows]``."""
    torch.index_select(x, 0, rows, out=out)
