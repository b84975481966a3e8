"""Matrix products with packed weights: few rows by the kernel of `packed_rows`, more on Hopper by that of `packed_wide`, many
by cuBLAS on the widened weight.

Plain weights, and packed ones that this layout does not take, go the way of `vllm_cuda.linear`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from vllm_core.api import Weight
from vllm_cuda import chip, packed_rows, packed_wide, tiles
from vllm_cuda import linear as plain
from vllm_cuda.backends.packed import tile_of
from vllm_cuda.backends.packed_wide import wide_tile
from vllm_cuda.packed import Packed, pack
from vllm_cuda.packed_tiles import BLOCK, Layout, PackedForm, WideForm
from vllm_triton.ops import quant
from vllm_triton.ops.elementwise import gated_activation, kind_of
from vllm_triton.ops.norm import rms_norm

FEW = 128
"""Rows up to which products of `MOST` rows each cost less than widening the weight before one, where `packed_wide` is not."""

MOST = 64
"""Rows of one launch."""

_ALIGNMENT = 16
"""Bytes at whose multiples rows of x are read."""


def linear_pack(weight: Weight, bias: Tensor | None, readers: Sequence[str]) -> Packed | plain.Packed:
    """As `vllm_triton.ops.linear.linear_pack`, with the codes laid out anew."""
    if isinstance(weight, Tensor):
        return plain.linear_pack(weight, bias, readers)
    shared = quant.pack(weight, bias, on="linear_pack")
    return pack(shared) or plain.Packed(shared, False)


def linear(out: Tensor, x: Tensor, weight: Packed | plain.Packed) -> None:
    """``out = x @ weight.T + bias``; a float32 out of narrower x is not rounded in between."""
    if not isinstance(weight, Packed):
        plain.linear(out, x, weight)
    elif not _by_kernel(out, x, weight, tiles.PLAIN):
        whole = packed_rows.widened(weight, x.dtype, chip.active().architecture).t()
        if out.dtype == x.dtype:
            torch.mm(x, whole, out=out)
        else:
            torch.mm(x, whole, out_dtype=out.dtype, out=out)
        if weight.bias is not None:
            out.add_(weight.bias)


def linear_add(residual: Tensor, delta: Tensor, x: Tensor, weight: Packed | plain.Packed) -> None:
    """``residual += x @ weight.T + bias``; ``delta`` is scratch."""
    if not isinstance(weight, Packed):
        plain.linear_add(residual, delta, x, weight)
    elif not _by_kernel(residual, x, weight, tiles.ADD):
        residual.addmm_(x, packed_rows.widened(weight, x.dtype, chip.active().architecture).t())
        if weight.bias is not None:
            residual.add_(weight.bias)


def rms_norm_linear(out: Tensor, normed: Tensor, x: Tensor, norm: Tensor, eps: float, weight: Packed | plain.Packed) -> None:
    """``out = rms_norm(x) @ weight.T + bias``; ``normed`` is scratch."""
    if isinstance(weight, Packed):
        rms_norm(normed, x, norm, eps)
        linear(out, normed, weight)
    else:
        plain.rms_norm_linear(out, normed, x, norm, eps, weight)


def gated_linear(out: Tensor, wide: Tensor, x: Tensor, weight: Packed | plain.Packed, kind: str) -> None:
    """``out = f(gate) * up`` with [gate, up] = x @ weight.T + bias; ``wide`` is scratch."""
    if not isinstance(weight, Packed):
        plain.gated_linear(out, wide, x, weight, kind)
    elif weight.rows % (2 * BLOCK) or not _by_kernel(out, x, weight, tiles.GATED, kind):
        linear(wide, x, weight)
        gated_activation(out, wide, kind)


def rms_norm_gated_linear(
    out: Tensor, wide: Tensor, normed: Tensor, x: Tensor, norm: Tensor, eps: float, weight: Packed | plain.Packed, kind: str
) -> None:
    """``out = f(gate) * up`` with [gate, up] = rms_norm(x) @ weight.T + bias; ``wide`` and ``normed`` are scratch."""
    if isinstance(weight, Packed):
        rms_norm(normed, x, norm, eps)
        gated_linear(out, wide, normed, weight, kind)
    else:
        plain.rms_norm_gated_linear(out, wide, normed, x, norm, eps, weight, kind)


def _by_kernel(out: Tensor, x: Tensor, weight: Packed, epilogue: int, kind: str = "silu") -> bool:
    """Whether a kernel that reads the weight as it is has done it."""
    wide_out, half, bias, on = out.dtype == torch.float32, x.dtype == torch.float16, weight.bias is not None, chip.active()
    count, rows = out.shape
    wide = _wide_form(count, rows, weight.columns, weight.layout, epilogue, kind, bias, wide_out, half, on)
    if wide is None and count > FEW:
        return False
    if not (x.is_contiguous() and x.data_ptr() % _ALIGNMENT == 0):
        x = x.clone(memory_format=torch.contiguous_format)
    if wide is not None:
        packed_wide.launch(out, x, weight, wide)
        return True
    for begin in range(0, count, MOST):
        some = out[begin : begin + MOST]
        form = _form(some.shape[0], rows, weight.columns, weight.layout, epilogue, kind, bias, wide_out, half, on)
        packed_rows.launch(some, x[begin : begin + MOST], weight, form, on.architecture)
    return True


@lru_cache(maxsize=4096)
def _wide_form(
    count: int,
    rows: int,
    columns: int,
    layout: Layout,
    epilogue: int,
    kind: str,
    bias: bool,
    wide_out: bool,
    half: bool,
    on: chip.Chip,
) -> WideForm | None:
    """Form of the kernel of many rows for out [count, rows] of x [count, columns]; None where another way is faster."""
    tile = wide_tile(count, rows, columns, layout, epilogue == tiles.GATED, on)
    return None if tile is None else WideForm(layout, tile, epilogue, kind_of(kind), bias, wide_out, half)


@lru_cache(maxsize=4096)
def _form(
    count: int,
    rows: int,
    columns: int,
    layout: Layout,
    epilogue: int,
    kind: str,
    bias: bool,
    wide_out: bool,
    half: bool,
    on: chip.Chip,
) -> PackedForm:
    """Form of the kernel of few rows for out [count, rows] of x [count, columns]."""
    groups = -(-count // 8)
    # As many columns as products come in: fewer forms.
    groups = groups if groups <= 4 else 8 if groups > 6 else 6
    tile = tile_of(groups, rows, columns, layout, epilogue == tiles.GATED, on)
    return PackedForm(layout, tile, groups, epilogue, kind_of(kind), bias, wide_out, half)
