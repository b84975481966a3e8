"""Matrix products: on Hopper few rows in bfloat16 by the kernel of `few_rows`, many by that of `many_rows`, others as
`vllm_triton.ops.linear` has them.

Which shapes the kernels take is in the family's tuning, `backends.hopper.streamed` and `backends.hopper.many`: those at which
they were measured to be faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from vllm_core.api import Weight
from vllm_cuda import few_rows, many_rows, tiles
from vllm_cuda.backends import hopper
from vllm_cuda.many_tiles import ManyForm
from vllm_triton.ops import linear as shared
from vllm_triton.ops import quant
from vllm_triton.ops.elementwise import kind_of
from vllm_triton.ops.norm import rms_norm
from vllm_triton.tuning import active

_ALIGNMENT = 16
"""Bytes at whose multiples bulk tensor copies find rows."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight as the shared products have it, and whether bulk tensor copies can read it."""

    shared: shared.Packed | quant.QuantPacked
    streamable: bool


def linear_pack(weight: Weight, bias: Tensor | None, readers: Sequence[str]) -> Packed:
    """As `vllm_triton.ops.linear.linear_pack`."""
    packed = shared.linear_pack(weight, bias, readers)
    streamable = (
        isinstance(packed, shared.Packed)
        and _readable(packed.weight)
        and packed.weight.shape[0] % 8 == 0
        and packed.weight.shape[1] * packed.weight.element_size() % _ALIGNMENT == 0
        and (bias is None or (bias.dtype == packed.weight.dtype and _aligned(bias)))
    )
    return Packed(packed, streamable)


def linear(out: Tensor, x: Tensor, weight: Packed) -> None:
    """``out = x @ weight.T + bias``; a float32 out of narrower x is not rounded in between."""
    if not _launched(out, x, weight, tiles.PLAIN):
        shared.linear(out, x, weight.shared)


def linear_add(residual: Tensor, delta: Tensor, x: Tensor, weight: Packed) -> None:
    """``residual += x @ weight.T + bias``; ``delta`` is scratch."""
    if not _launched(residual, x, weight, tiles.ADD):
        shared.linear_add(residual, delta, x, weight.shared)


def rms_norm_linear(out: Tensor, normed: Tensor, x: Tensor, norm: Tensor, eps: float, weight: Packed) -> None:
    """``out = rms_norm(x) @ weight.T + bias``; ``normed`` is scratch."""
    if x.shape[0] == 1:
        shared.rms_norm_linear(out, normed, x, norm, eps, weight.shared)
        return
    rms_norm(normed, x, norm, eps)
    linear(out, normed, weight)


def gated_linear(out: Tensor, wide: Tensor, x: Tensor, weight: Packed, kind: str) -> None:
    """``out = f(gate) * up`` with [gate, up] = x @ weight.T + bias; ``wide`` is scratch."""
    if not _launched(out, x, weight, tiles.GATED, kind):
        shared.gated_linear(out, wide, x, weight.shared, kind)


def rms_norm_gated_linear(
    out: Tensor, wide: Tensor, normed: Tensor, x: Tensor, norm: Tensor, eps: float, weight: Packed, kind: str
) -> None:
    """``out = f(gate) * up`` with [gate, up] = rms_norm(x) @ weight.T + bias; ``wide`` and ``normed`` are scratch."""
    if x.shape[0] == 1:
        shared.rms_norm_gated_linear(out, wide, normed, x, norm, eps, weight.shared, kind)
        return
    rms_norm(normed, x, norm, eps)
    gated_linear(out, wide, normed, weight, kind)


def _launched(out: Tensor, x: Tensor, weight: Packed, epilogue: int, kind: str = "silu") -> bool:
    """Launch the kernel that takes this product, if one does; whether one did."""
    packed, on = weight.shared, active()
    if not (weight.streamable and isinstance(packed, shared.Packed) and _readable(x) and _aligned(out)):
        return False
    if on.family != hopper.TUNING.family or x.dtype != packed.weight.dtype:
        return False
    shape, bias, chip = (*x.shape, packed.weight.shape[0], epilogue, kind), packed.bias is not None, on.multiprocessors
    if out.dtype != x.dtype:
        return False
    few = _few(*shape, bias, chip) if x.dtype == torch.bfloat16 else None
    if few is not None:
        few_rows.launch(out, x, packed.weight, packed.bias, few, chip)
        return True
    many = _many(*shape, bias, x.dtype == torch.float16, chip)
    if many is None:
        return False
    many_rows.launch(out, x, packed.weight, packed.bias, *many, chip)
    return True


@lru_cache(maxsize=4096)
def _few(count: int, columns: int, rows: int, epilogue: int, kind: str, bias: bool, multiprocessors: int) -> tiles.Form | None:
    """Form of the kernel of few rows for x [count, columns] and a weight of ``rows`` rows; None where it does not take them."""
    gated = epilogue == tiles.GATED
    rows //= 2 if gated else 1
    tile = hopper.streamed(count, rows, columns, gated, multiprocessors) if rows % 8 == 0 else None
    return None if tile is None else tiles.Form(tile=tile, epilogue=epilogue, kind=kind_of(kind), bias=bias)


@lru_cache(maxsize=4096)
def _many(
    count: int, columns: int, rows: int, epilogue: int, kind: str, bias: bool, half: bool, multiprocessors: int
) -> tuple[ManyForm, int] | None:
    """As `_few` of the kernel of many rows, and how far its tiles go down."""
    gated = epilogue == tiles.GATED
    rows //= 2 if gated else 1
    tile = hopper.many(count, rows, columns, gated, bias, multiprocessors) if rows % 8 == 0 else None
    if tile is None:
        return None
    return ManyForm(rows=tile.rows, epilogue=epilogue, kind=kind_of(kind), bias=bias, half=half), tile.height


def _readable(matrix: Tensor) -> bool:
    return matrix.dtype in (torch.bfloat16, torch.float16) and _aligned(matrix)


def _aligned(matrix: Tensor) -> bool:
    return matrix.is_contiguous() and matrix.data_ptr() % _ALIGNMENT == 0
