"""References: rows of a table."""

from __future__ import annotations

import torch
from torch import Tensor


def embedding(out: Tensor, ids: Tensor, weight: Tensor, scale: float) -> None:
    """``out[T,H] = weight[ids] * scale``."""
    torch.mul(weight.index_select(0, ids), scale, out=out)


def gather_rows(out: Tensor, x: Tensor, rows: Tensor) -> None:
    """``out[R,H] = x[rows]``."""
    torch.index_select(x, 0, rows, out=out)
