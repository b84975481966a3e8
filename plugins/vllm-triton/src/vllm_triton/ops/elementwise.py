"""Embedding, gather, gated activation."""

from __future__ import annotations

from torch import Tensor

from vllm_triton.kernels import elementwise
from vllm_triton.ops.launch import power_of_2
from vllm_triton.tuning import active

KINDS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}
_COLUMNS = 1024


def embedding(out: Tensor, ids: Tensor, weight: Tensor, scale: float) -> None:
    """``out = weight[ids] * scale``: int32 ids [T], weight [V,H]."""
    _gather(out, weight, ids, scale)


def gather_rows(out: Tensor, x: Tensor, rows: Tensor) -> None:
    """``out = x[rows]``: int64 rows [R]."""
    _gather(out, x, rows, 1.0)


def _gather(out: Tensor, x: Tensor, rows: Tensor, scale: float) -> None:
    count, size = out.shape
    if not count:
        return
    block = min(_COLUMNS, power_of_2(size))
    dependent = active().dependent
    elementwise.gather_rows[(count, -(-size // block))](
        out, x.contiguous(), rows, scale, SIZE=size, BLOCK=block, SCALED=scale != 1.0, num_warps=4, **dependent
    )


def gated_activation(out: Tensor, x: Tensor, kind: str) -> None:
    """``out = f(x[:, :I]) * x[:, I:]``: x [T,2I], out [T,I]."""
    count, size = out.shape
    if not count:
        return
    block = min(_COLUMNS, power_of_2(size))
    dependent = active().dependent
    elementwise.gated_activation[(count, -(-size // block))](
        out, x.contiguous(), SIZE=size, BLOCK=block, KIND=KINDS[kind], num_warps=4, **dependent
    )
