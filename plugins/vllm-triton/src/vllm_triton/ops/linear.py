"""Matrix products: kernels of our own for few rows, whose time is that of reading the weight, and cuBLAS for many.

The fused forms take what lies around the product into the kernel where there are few rows, and put it around cuBLAS
where there are many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_core.api import Weight
from vllm_triton.kernels import linear as kernels
from vllm_triton.ops import quant
from vllm_triton.ops.elementwise import gated_activation, kind_of
from vllm_triton.ops.launch import Launch, Programs, Scratch, settled
from vllm_triton.ops.norm import rms_norm
from vllm_triton.tuning import active

FEW, FEW_SMALL = 64, 128
"""Rows up to which our kernels read a weight as fast as cuBLAS, and take more along; of small weights launches count more."""

SMALL_WEIGHT = 8 << 20
"""Elements of a small weight."""

_PLAIN, _ADD, _GATED = 0, 1, 2
_PARTS = Scratch(32 << 20, dtype=torch.float32)
_LOCKS = Scratch(64 << 10, dtype=torch.int32, zero=True)


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight [N,K] as it is, its transposed view for cuBLAS, its bias, and how many rows of x our kernels take."""

    weight: Tensor
    transposed: Tensor
    bias: Tensor | None
    few: int


def linear_pack(weight: Weight, bias: Tensor | None, readers: Sequence[str]) -> Packed | quant.QuantPacked:
    """Keep the weight; `readers` does not matter here. Raises UnsupportedError for a format without a kernel."""
    if not isinstance(weight, Tensor):
        return quant.pack(weight, bias, on="linear_pack")
    few = FEW_SMALL if weight.numel() <= SMALL_WEIGHT else FEW
    readable = weight.dtype != torch.float32 and weight.shape[1] % 128 == 0
    return Packed(weight, weight.t(), bias, few if readable else 0)


def linear(out: Tensor, x: Tensor, weight: Packed | quant.QuantPacked) -> None:
    """``out = x @ weight.T + bias``; a float32 out of narrower x is not rounded in between."""
    if isinstance(weight, quant.QuantPacked):
        if quant.takes(x, _PLAIN):
            quant.few_rows(out, x, weight, _PLAIN)
            return
        weight = _widened(weight, x.dtype)
    if x.shape[0] <= weight.few:
        _few(out, x, weight, _PLAIN)
        return
    if out.dtype == x.dtype:
        torch.mm(x, weight.transposed, out=out)
    else:
        torch.mm(x, weight.transposed, out_dtype=out.dtype, out=out)
    if weight.bias is not None:
        out.add_(weight.bias)


def linear_add(residual: Tensor, delta: Tensor, x: Tensor, weight: Packed | quant.QuantPacked) -> None:
    """``residual += x @ weight.T + bias``; ``delta`` is scratch."""
    if isinstance(weight, quant.QuantPacked):
        if quant.takes(x, _ADD):
            quant.few_rows(residual, x, weight, _ADD)
            return
        weight = _widened(weight, x.dtype)
    if x.shape[0] <= weight.few:
        _few(residual, x, weight, _ADD)
        return
    residual.addmm_(x, weight.transposed)
    if weight.bias is not None:
        residual.add_(weight.bias)


def rms_norm_linear(
    out: Tensor, normed: Tensor, x: Tensor, norm: Tensor, eps: float, weight: Packed | quant.QuantPacked
) -> None:
    """``out = rms_norm(x) @ weight.T + bias``; ``normed`` is scratch."""
    if isinstance(weight, Packed) and weight.few and x.shape[0] == 1:
        _few(out, x, weight, _PLAIN, norm=norm, eps=eps)
        return
    rms_norm(normed, x, norm, eps)
    linear(out, normed, weight)


def gated_linear(out: Tensor, wide: Tensor, x: Tensor, weight: Packed | quant.QuantPacked, kind: str) -> None:
    """``out = f(gate) * up`` with [gate, up] = x @ weight.T + bias; ``wide`` is scratch."""
    if isinstance(weight, quant.QuantPacked):
        if quant.takes(x, _GATED):
            quant.few_rows(out, x, weight, _GATED, kind)
            return
    elif x.shape[0] <= weight.few:
        _few(out, x, weight, _GATED, kind=kind)
        return
    linear(wide, x, weight)
    gated_activation(out, wide, kind)


def rms_norm_gated_linear(
    out: Tensor,
    wide: Tensor,
    normed: Tensor,
    x: Tensor,
    norm: Tensor,
    eps: float,
    weight: Packed | quant.QuantPacked,
    kind: str,
) -> None:
    """``out = f(gate) * up`` with [gate, up] = rms_norm(x) @ weight.T + bias; ``wide`` and ``normed`` are scratch."""
    if isinstance(weight, Packed) and weight.few and x.shape[0] == 1:
        _few(out, x, weight, _GATED, norm=norm, eps=eps, kind=kind)
        return
    rms_norm(normed, x, norm, eps)
    gated_linear(out, wide, normed, weight, kind)


def _widened(weight: quant.QuantPacked, dtype: torch.dtype) -> Packed:
    """The weight as cuBLAS reads it, for one product."""
    whole = quant.widened(weight, dtype)
    return Packed(whole, whole.t(), weight.bias, 0)


def _few(
    out: Tensor, x: Tensor, weight: Packed, epilogue: int, *, norm: Tensor | None = None, eps: float = 0.0, kind: str = "silu"
) -> None:
    count, columns = x.shape
    if not count:
        return
    x = x.contiguous()
    rows = weight.weight.shape[0] // (2 if epilogue == _GATED else 1)
    bias = out if weight.bias is None else weight.bias
    fixed = (rows, columns, weight.bias is not None, epilogue, kind)
    if count == 1:
        programs, launch = _one_row(*fixed, None if norm is None else eps)
        launch.start(programs, out, x, weight.weight, bias, x if norm is None else norm)
        return
    most, programs, launch = _few_rows(count, *fixed, x.element_size())
    if count > most:
        # A tile holds fewer rows here: the weight is read once for each.
        for begin in range(0, count, most):
            part = slice(begin, begin + most)
            _few(out[part], x[part], weight, epilogue, norm=norm, eps=eps, kind=kind)
        return
    launch.start(programs, out, x, weight.weight, bias, _PARTS.get(x.device), _LOCKS.get(x.device))


@settled
def _one_row(rows: int, columns: int, biased: bool, epilogue: int, kind: str, eps: float | None) -> tuple[Programs, Launch]:
    """Of a weight [rows, columns], or two where gated; x is normed where there is an eps."""
    tile = active().one_row(rows, columns)
    launch = Launch(
        kernels.one_row,
        eps=eps or 0.0,
        N=rows,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        NORM=eps is not None,
        num_warps=tile.warps,
        **dict(tile.options),
        **_fixed(columns, biased, epilogue, kind),
    )
    return (-(-rows // tile.block_n), 1, 1), launch


@settled
def _few_rows(
    count: int, rows: int, columns: int, biased: bool, epilogue: int, kind: str, item_bytes: int
) -> tuple[int, Programs, Launch]:
    """Of a weight as of `_one_row`, after the most rows of x that a tile takes."""
    tile = active().few_rows(count, rows, columns, epilogue == _GATED)
    launch = Launch(
        kernels.few_rows,
        T=count,
        N=rows,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        SPLIT=tile.split,
        AHEAD=min(tile.ahead, columns // tile.split * item_bytes),
        STAGES=tile.stages,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **dict(tile.options),
        **_fixed(columns, biased, epilogue, kind),
    )
    return tile.block_m, (-(-rows // tile.block_n), tile.split, 1), launch


def _fixed(columns: int, biased: bool, epilogue: int, kind: str) -> dict[str, int]:
    return {"K": columns, "BIAS": biased, "EPILOGUE": epilogue, "KIND": kind_of(kind), **active().dependent}
