"""Activations, sums, rows and pooling through the C ABI. Oracles: the references of the same names in `vllm_core.ops`."""

from __future__ import annotations

from torch import Tensor

from vllm_core.api import UnsupportedError
from vllm_cpu.ops.native_call import DTYPES, KINDS, function, packer

_pack_elementwise = packer("PPPqqqqqqqd")
_pack_rows = packer("PPPPqqqqqqqq")
_gated_activation, _activation, _soft_cap, _add, _gather_rows, _pool = map(
    function, ("gated_activation", "activation", "soft_cap", "add", "gather_rows", "pool")
)
_POOLS = {"mean": 0, "cls": 1, "last": 2}


def gated_activation(out: Tensor, x: Tensor, kind: str) -> None:
    """``out[T,I] = f(x[:, :I]) * x[:, I:]``."""
    rows, size = out.shape
    fields = size, x.stride()[0], 0, rows, size, _code(KINDS, kind, "activation"), DTYPES[x.dtype], 0.0
    _gated_activation(_pack_elementwise(0, out.data_ptr(), x.data_ptr(), 0, *fields), out, x)


def activation(out: Tensor, x: Tensor, kind: str) -> None:
    """``out = f(x)``; out may be x."""
    rows, size = out.shape
    fields = out.stride()[0], x.stride()[0], 0, rows, size, _code(KINDS, kind, "activation"), DTYPES[x.dtype], 0.0
    _activation(_pack_elementwise(0, out.data_ptr(), x.data_ptr(), 0, *fields), out, x)


def soft_cap(logits: Tensor, cap: float) -> None:
    """``logits[R,V] = cap * tanh(logits / cap)`` in place."""
    rows, size = logits.shape
    at, stride = logits.data_ptr(), logits.stride()[0]
    _soft_cap(_pack_elementwise(0, at, at, 0, stride, stride, 0, rows, size, 0, DTYPES[logits.dtype], cap), logits)


def add(out: Tensor, a: Tensor, b: Tensor) -> None:
    """``out = a + b``; out may be either."""
    rows, size = out.shape
    fields = out.stride()[0], a.stride()[0], b.stride()[0], rows, size, 0, DTYPES[a.dtype], 0.0
    _add(_pack_elementwise(0, out.data_ptr(), a.data_ptr(), b.data_ptr(), *fields), out, a, b)


def gather_rows(out: Tensor, x: Tensor, rows: Tensor) -> None:
    """``out[R,H] = x[rows]``."""
    count, size = out.shape
    fields = size, x.stride()[0], count, x.shape[0], size, 0, 0, DTYPES[x.dtype]
    _gather_rows(_pack_rows(0, out.data_ptr(), x.data_ptr(), rows.data_ptr(), 0, *fields), out, x, rows)


def pool(out: Tensor, x: Tensor, query_start: Tensor, kind: str, normalize: bool) -> None:
    """float32 [S,H] from [T,H]: mean, first (``cls``) or last token of each row, of length 1 if asked."""
    count, size = out.shape
    fields = size, x.stride()[0], count, x.shape[0], size, _code(_POOLS, kind, "pooling"), int(normalize), DTYPES[x.dtype]
    _pool(_pack_rows(0, out.data_ptr(), x.data_ptr(), 0, query_start.data_ptr(), *fields), out, x, query_start)


def _code(codes: dict[str, int], kind: str, what: str) -> int:
    found = codes.get(kind)
    if found is None:
        raise UnsupportedError(
            f"Unknown {what}", on=kind, found="no such kind", expected=", ".join(codes), fix="choose one of these"
        )
    return found
