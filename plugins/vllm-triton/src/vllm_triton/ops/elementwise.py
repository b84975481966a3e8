"""Embedding, gather, sums, activations plain and gated."""

from __future__ import annotations

from torch import Tensor

from vllm_core.api import UnsupportedError
from vllm_triton.kernels import elementwise
from vllm_triton.ops.launch import power_of_2
from vllm_triton.tuning import active

KINDS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}
_COLUMNS = 1024


def kind_of(kind: str) -> int:
    """The kernels' number of an activation. Raises UnsupportedError for an unknown one."""
    found = KINDS.get(kind)
    if found is None:
        raise UnsupportedError(
            "Unknown activation", on=kind, found="no such kind", expected=", ".join(KINDS), fix="use one of these"
        )
    return found


def embedding(out: Tensor, ids: Tensor, weight: Tensor, scale: float) -> None:
    """``out = weight[ids] * scale``: int32 ids [T], weight [V,H]."""
    _gather(out, weight, ids, scale)


def embedding_shard(out: Tensor, ids: Tensor, weight: Tensor, first: int, scale: float) -> None:
    """``out = weight[ids - first] * scale`` where weight [N,H] has the row, else 0."""
    count, size = out.shape
    if not count:
        return
    block = min(_COLUMNS, power_of_2(size))
    elementwise.gather_shard[(count, -(-size // block))](
        out, ids, weight, first, weight.shape[0], float(scale), SIZE=size, BLOCK=block, num_warps=4, **active().dependent
    )


def add(out: Tensor, a: Tensor, b: Tensor) -> None:
    """``out = a + b``, all [T,H]; out may be a or b."""
    count, size = out.shape
    if not count:
        return
    block = min(_COLUMNS, power_of_2(size))
    rows = (out.stride(0), a.stride(0), b.stride(0))
    elementwise.add[(count, -(-size // block))](out, a, b, *rows, SIZE=size, BLOCK=block, num_warps=4, **active().dependent)


def activation(out: Tensor, x: Tensor, kind: str) -> None:
    """``out = f(x)``, both [T,I]; out may be x."""
    count, size = out.shape
    function = kind_of(kind)
    if not count:
        return
    block = min(_COLUMNS, power_of_2(size))
    elementwise.activation[(count, -(-size // block))](
        out, x, out.stride(0), x.stride(0), SIZE=size, BLOCK=block, KIND=function, num_warps=4, **active().dependent
    )


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
        out, x.contiguous(), SIZE=size, BLOCK=block, KIND=kind_of(kind), num_warps=4, **dependent
    )
