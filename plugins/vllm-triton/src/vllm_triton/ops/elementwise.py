"""Embedding, gather, sums, activations plain and gated."""

from __future__ import annotations

from torch import Tensor

from vllm_core.api import UnsupportedError
from vllm_triton.kernels import elementwise
from vllm_triton.ops.launch import Launch, Programs, power_of_2, settled
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
    if count:
        _embedding_shard(size, first, weight.shape[0], float(scale)).start(_programs(count, size), out, ids, weight)


@settled
def _embedding_shard(size: int, first: int, count: int, scale: float) -> Launch:
    return Launch(elementwise.gather_shard, first=first, count=count, scale=scale, **_options(size))


def add(out: Tensor, a: Tensor, b: Tensor) -> None:
    """``out = a + b``, all [T,H]; out may be a or b."""
    count, size = out.shape
    if count:
        _add(size, out.stride(0), a.stride(0), b.stride(0)).start(_programs(count, size), out, a, b)


@settled
def _add(size: int, out_row: int, a_row: int, b_row: int) -> Launch:
    return Launch(elementwise.add, out_row=out_row, a_row=a_row, b_row=b_row, **_options(size))


def activation(out: Tensor, x: Tensor, kind: str) -> None:
    """``out = f(x)``, both [T,I]; out may be x."""
    count, size = out.shape
    launch = _activation(size, out.stride(0), x.stride(0), kind)
    if count:
        launch.start(_programs(count, size), out, x)


@settled
def _activation(size: int, out_row: int, x_row: int, kind: str) -> Launch:
    return Launch(elementwise.activation, out_row=out_row, x_row=x_row, KIND=kind_of(kind), **_options(size))


def gather_rows(out: Tensor, x: Tensor, rows: Tensor) -> None:
    """``out = x[rows]``: int64 rows [R]."""
    _gather(out, x, rows, 1.0)


def _gather(out: Tensor, x: Tensor, rows: Tensor, scale: float) -> None:
    count, size = out.shape
    if count:
        _gather_rows(size, float(scale)).start(_programs(count, size), out, x.contiguous(), rows)


@settled
def _gather_rows(size: int, scale: float) -> Launch:
    return Launch(elementwise.gather_rows, scale=scale, SCALED=scale != 1.0, **_options(size))


def gated_activation(out: Tensor, x: Tensor, kind: str) -> None:
    """``out = f(x[:, :I]) * x[:, I:]``: x [T,2I], out [T,I]."""
    count, size = out.shape
    if count:
        _gated_activation(size, kind).start(_programs(count, size), out, x.contiguous())


@settled
def _gated_activation(size: int, kind: str) -> Launch:
    return Launch(elementwise.gated_activation, KIND=kind_of(kind), **_options(size))


def _programs(count: int, size: int) -> Programs:
    return count, -(-size // _COLUMNS), 1


def _options(size: int) -> dict[str, int]:
    return {"SIZE": size, "BLOCK": min(_COLUMNS, power_of_2(size)), "num_warps": 4, **active().dependent}
