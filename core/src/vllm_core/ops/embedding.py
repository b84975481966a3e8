"""References: rows of a table."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_core.api.quant import Weight
from vllm_core.ops import quant


def embedding(out: Tensor, ids: Tensor, weight: Weight, scale: float) -> None:
    """``out[T,H] = weight[ids] * scale``; quantised rows are decoded first."""
    torch.mul(quant.select_rows(weight, ids), scale, out=out)


def embedding_shard(out: Tensor, ids: Tensor, weight: Weight, first: int, scale: float) -> None:
    """``out[T,H] = weight[ids - first] * scale``, 0 where another worker holds the row."""
    local = ids - first
    here = (local >= 0) & (local < weight.shape[0])
    rows = quant.select_rows(weight, local.where(here, 0)) * scale
    out.copy_(rows.masked_fill_(~here[:, None], 0))


def gather_rows(out: Tensor, x: Tensor, rows: Tensor) -> None:
    """``out[R,H] = x[rows]``."""
    torch.index_select(x, 0, rows, out=out)
