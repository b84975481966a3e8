"""Reference: one vector per row."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from vllm_core.errors import UnsupportedError
from vllm_core.ops.rows import row_of_tokens


def pool(out: Tensor, x: Tensor, query_start: Tensor, kind: str, normalize: bool) -> None:
    """float32 [S,H] from [T,H]: mean, first (``cls``) or last token of each row, then of length 1 if asked."""
    match kind:
        case "mean":
            rows = row_of_tokens(query_start, x.shape[0])
            sums = torch.zeros_like(out).index_add_(0, rows, x.float())
            pooled = sums / query_start.diff().clamp(min=1).unsqueeze(1)
        case "cls":
            pooled = x[query_start[:-1]].float()
        case "last":
            pooled = x[query_start[1:] - 1].float()
        case _:
            raise UnsupportedError(
                "Unknown pooling", on=kind, found="no such kind", expected="mean, cls or last", fix="choose one of these"
            )
    out.copy_(functional.normalize(pooled, dim=1) if normalize else pooled)
