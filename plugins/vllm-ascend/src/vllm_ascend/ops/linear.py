"""Products, with the weight in the format that the chip's matrix unit reads (FRACTAL_NZ)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch_npu
from torch import Tensor

FRACTAL_NZ = 29
"""`aclFormat` of the matrix unit: blocks of 16 rows and 32 bytes."""
ROWS, ROW_BYTES = 16, 32


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight [N, K], in FRACTAL_NZ where it divides into blocks, and its bias [N] or None."""

    weight: Tensor
    bias: Tensor | None


def linear_pack(weight: Tensor, bias: Tensor | None, readers: Sequence[str]) -> Packed:
    """Bring the weight into the matrix unit's format, unless others read its rows as they are."""
    rows, columns = weight.shape
    divides = rows % ROWS == 0 and columns * weight.element_size() % ROW_BYTES == 0
    alone = not any("embed" in reader for reader in readers)
    if weight.dtype in (torch.float16, torch.bfloat16) and divides and alone:
        return Packed(torch_npu.npu_format_cast(weight.contiguous(), FRACTAL_NZ), bias)
    return Packed(weight, bias)


def linear(out: Tensor, x: Tensor, weight: Packed) -> None:
    """``out = x @ weight.T + bias``. A float32 out of narrower x holds the product rounded to x's dtype."""
    if out.dtype == x.dtype:
        torch.mm(x, weight.weight.t(), out=out)
    else:
        out.copy_(torch.mm(x, weight.weight.t()))
    if weight.bias is not None:
        out.add_(weight.bias)


def linear_add(residual: Tensor, delta: Tensor, x: Tensor, weight: Packed) -> None:
    """``residual += linear(x)``, in one call of the matrix unit."""
    residual.addmm_(x, weight.weight.t())
    if weight.bias is not None:
        residual.add_(weight.bias)
