"""Products, with the weight in the format that the chip's matrix unit reads (FRACTAL_NZ), or in int8 with a scale a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch_npu
from torch import Tensor

from vllm_core.api import QuantStack, QuantTensor, UnsupportedError, Weight

FRACTAL_NZ = 29
"""`aclFormat` of the matrix unit: blocks of 16 rows and 32 bytes."""
ROWS, ROW_BYTES = 16, 32
HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight [N, K], in FRACTAL_NZ where it divides into blocks, and its bias [N] or None."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class PackedInt8:
    """The codes of a weight, int8 [K, N] over rows in memory as they came, the float32 scales [N] of its rows, and its bias.

    The vendor's product wants scales and bias in dtypes that follow from x: they are cast at each call.
    """

    codes: Tensor
    scale: Tensor
    bias: Tensor | None


def linear_pack(weight: Weight, bias: Tensor | None, readers: Sequence[str]) -> Packed | PackedInt8:
    """Bring the weight into the matrix unit's format, unless others read its rows as they are. Raises UnsupportedError."""
    if isinstance(weight, QuantTensor) and weight.format == "int8_channel":
        assert weight.scale is not None
        return PackedInt8(weight.data.t(), weight.scale.reshape(-1), bias)
    if isinstance(weight, (QuantTensor, QuantStack)):
        raise UnsupportedError(
            "Format of a weight has no product",
            on="linear_pack",
            found=weight.format if isinstance(weight, QuantTensor) else "a stack of formats",
            expected="int8_channel, or numbers of the model's dtype",
            fix="let the loader decode it",
        )
    rows, columns = weight.shape
    divides = rows % ROWS == 0 and columns * weight.element_size() % ROW_BYTES == 0
    alone = not any("embed" in reader for reader in readers)
    if weight.dtype in HALF and divides and alone:
        return Packed(torch_npu.npu_format_cast(weight.contiguous(), FRACTAL_NZ), bias)
    return Packed(weight, bias)


def linear(out: Tensor, x: Tensor, weight: Packed | PackedInt8) -> None:
    """``out = x @ weight.T + bias``. A float32 out of narrower x holds the product rounded to x's dtype."""
    if isinstance(weight, PackedInt8):
        out.copy_(_int8(x, weight))
        return
    if out.dtype == x.dtype:
        torch.mm(x, weight.weight.t(), out=out)
    else:
        out.copy_(torch.mm(x, weight.weight.t()))
    if weight.bias is not None:
        out.add_(weight.bias)


def linear_add(residual: Tensor, delta: Tensor, x: Tensor, weight: Packed | PackedInt8) -> None:
    """``residual += linear(x)``, in one call of the matrix unit where the weight is not quantised."""
    if isinstance(weight, PackedInt8):
        residual.add_(_int8(x, weight))
        return
    residual.addmm_(x, weight.weight.t())
    if weight.bias is not None:
        residual.add_(weight.bias)


def _int8(x: Tensor, weight: PackedInt8) -> Tensor:
    """`npu_weight_quant_batchmatmul`: the codes are widened inside the product, x stays what it is."""
    if x.dtype not in HALF:
        raise UnsupportedError(
            "Product with an int8 weight has no call",
            on="npu_weight_quant_batchmatmul",
            found=str(x.dtype).removeprefix("torch."),
            expected="float16 or bfloat16",
            fix="choose another --dtype, or let the loader decode the weight: --provider linear=reference",
        )
    bias = weight.bias
    if bias is not None:
        bias = bias.to(torch.float32 if x.dtype == torch.bfloat16 else torch.float16)
    product: Tensor = torch_npu.npu_weight_quant_batchmatmul(x.contiguous(), weight.codes, weight.scale.to(x.dtype), bias=bias)
    return product
