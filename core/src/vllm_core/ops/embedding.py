"""References: rows of a table."""

from __future__ import annotations

import torch
from torch import Tensor


def embedding(out: Tensor, ids: Tensor, weight: Tensor, scale: float) -> None:
    """``out[T,H] = weight[ids] * scale``."""
    torch.mul(weight.index_select(0, ids), scale, out=out)


def embedding_shard(out: Tensor, ids: Tensor, weight: Tensor, first: int, scale: float) -> None:
    """``out[T,H] = weight[ids - first] * scale``, 0 where another worker holds the row."""
    local = ids - first
    here = (local >= 0) & (local < len(weight))
    rows = weight.index_select(0, local.where(here, 0)) * scale
    out.copy_(rows.masked_fill_(~here[:, None], 0))


def gather_rows(out: Tensor, x: Tensor, rows: Tensor) -> None:
    """``out[R,H] = x[rows]``."""
    torch.index_select(x, 0, rows, out=out)
