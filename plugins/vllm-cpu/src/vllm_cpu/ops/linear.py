"""Matrix products on the host through torch.mm. Oracle: `vllm_core.ops.linear`.

float32: the BLAS takes other kernels, with other orders of summation, for a handful of rows than for many. Padding
the rows to a multiple of `ROW_GRANULE` keeps each row on one kernel, so that its result does not depend on how many
others there are; a test holds it over all numbers of rows. With AVX-512 it shares the work otherwise for each number of
rows, too: there every product is one of `TILE_ROWS` rows.
bfloat16 and float16: without instructions for them torch's product is many times slower than widening the weight
tile by tile, which is more exact too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_core.api import QuantTensor, UnsupportedError, Weight
from vllm_cpu import probe
from vllm_cpu.recording import recorded

_FEATURES = probe.features()
ROW_GRANULE = 8 if "avx512f" in _FEATURES else 4
"""4 was measured with AVX2; wider vectors have wider kernels."""

TILE_ROWS = 32 if "avx512f" in _FEATURES else 0
"""Rows of each product in float32, 0 where any number is one. On a Xeon with AMX 128 rows took 1.2 to 2 times as long in tiles
of 32 as at once, 2 to 3 times in tiles of 16; one row a quarter longer than in tiles of 16."""

PADDED_ROWS = 64
"""From here on every number of rows gave the same results where it was measured."""

TILE_ELEMENTS = 1 << 22
NATIVE_NARROW = bool({"avx512_bf16", "amx_bf16"} & _FEATURES)
"""Whether products of bfloat16 have instructions of their own."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight as torch.mm reads it: [K,N], a view of the contiguous [N,K]; bias [N] or None."""

    transposed: Tensor
    bias: Tensor | None
    readers: tuple[str, ...]
    widened: bool

    @property
    def out_features(self) -> int:
        """Columns of the output."""
        return self.transposed.shape[1]


def linear_pack(weight: Weight, bias: Tensor | None, readers: Sequence[str]) -> Packed:
    """Keep the tensor: [N,K] rows are contiguous. Raises UnsupportedError for a quantised weight."""
    if not isinstance(weight, Tensor):
        raise UnsupportedError(
            "Format of a weight has no product here",
            on="linear_pack",
            found=weight.format if isinstance(weight, QuantTensor) else "a stack of formats",
            expected="numbers of the model's dtype",
            fix="let the loader decode it, or use the native library, which reads some formats",
        )
    narrow = weight.dtype is not torch.float32
    native = weight.dtype is torch.bfloat16 and NATIVE_NARROW
    return Packed(weight.contiguous().t(), bias, tuple(readers), narrow and not native)


@recorded
def linear(out: Tensor, x: Tensor, weight: Packed) -> None:
    """``out[T,N] = x[T,K] @ weight + bias``; out may be float32 where x is narrow."""
    if TILE_ROWS and not weight.widened and x.dtype is torch.float32:
        _tiled(out, x, weight)
    elif weight.widened or x.dtype is not torch.float32 or len(x) % ROW_GRANULE == 0 or len(x) > PADDED_ROWS:
        linear_unpadded(out, x, weight)
        return
    else:
        out.copy_(torch.mm(_padded(x, ROW_GRANULE), weight.transposed)[: len(x)])
    if weight.bias is not None:
        out.add_(weight.bias)


@recorded
def linear_unpadded(out: Tensor, x: Tensor, weight: Packed) -> None:
    """`linear` without padding: a single row is a matrix-vector product, whose sums may differ in the last bits."""
    if weight.widened and not (len(x) == 1 and out.dtype is x.dtype):
        _widened(out, x, weight)
    else:
        _plain(out, x, weight)
    if weight.bias is not None:
        out.add_(weight.bias)


def _plain(out: Tensor, x: Tensor, weight: Packed) -> None:
    if out.dtype is x.dtype:
        torch.mm(x, weight.transposed, out=out)
    else:
        out.copy_(torch.mm(x, weight.transposed))


def _tiled(out: Tensor, x: Tensor, weight: Packed) -> None:
    for begin in range(0, len(x), TILE_ROWS):
        rows = out[begin : begin + TILE_ROWS]
        rows.copy_(torch.mm(_padded(x[begin : begin + TILE_ROWS], TILE_ROWS), weight.transposed)[: len(rows)])


def _padded(x: Tensor, granule: int) -> Tensor:
    if len(x) % granule == 0:
        return x
    padded = x.new_zeros(-(-len(x) // granule) * granule, x.shape[1])
    padded[: len(x)] = x
    return padded


def _widened(out: Tensor, x: Tensor, weight: Packed) -> None:
    """Products in float32, the weight widened tile by tile so that it never exists whole in float32."""
    wide = x.float()
    if len(x) <= PADDED_ROWS:
        wide = _padded(wide, ROW_GRANULE)
    columns = max(1, TILE_ELEMENTS // wide.shape[1])
    for begin in range(0, weight.out_features, columns):
        tile = slice(begin, begin + columns)
        out[:, tile] = torch.mm(wide, weight.transposed[:, tile].float())[: len(x)]
