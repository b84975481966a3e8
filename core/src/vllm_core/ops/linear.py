"""References: the family ``linear``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vllm_core.api.quant import QuantTensor, Weight
from vllm_core.ops import quant
from vllm_core.ops.activation import gated_activation
from vllm_core.ops.norm import rms_norm

FP8_ROUNDING = {"fp8_tensor": 0, "fp8_channel": 0, "fp8_block128": quant.FP8_SIDE}
"""Inputs of a row that share a scale where they are rounded to fp8 for a weight of this format; 0: all of it."""


@dataclass(frozen=True, slots=True)
class Packed:
    """The reference's form of a weight: the tensors themselves. `readers` are the layers that use it.

    Where inputs are rounded to fp8, `rounding` of a row share a scale; 0 is all of it.
    """

    weight: Tensor
    bias: Tensor | None
    readers: tuple[str, ...]
    rounding: int | None = None

    @property
    def out_features(self) -> int:
        """Columns of the output."""
        return self.weight.shape[0]


def linear_pack(weight: Weight, bias: Tensor | None, readers: Sequence[str]) -> Packed:
    """Keep the tensors; a quantised weight is decoded to float32."""
    plain = weight if isinstance(weight, Tensor) else quant.decode(weight, torch.float32)
    return Packed(plain, bias, tuple(readers))


def linear_pack_fp8(weight: Weight, bias: Tensor | None, readers: Sequence[str]) -> Packed:
    """`linear_pack` where call sites ask for `FP8_ACTIVATION`: inputs are rounded too, if the weight is in fp8."""
    packed = linear_pack(weight, bias, readers)
    if isinstance(weight, QuantTensor) and weight.format in FP8_ROUNDING:
        return replace(packed, rounding=FP8_ROUNDING[weight.format])
    return packed


def linear(out: Tensor, x: Tensor, weight: Packed) -> None:
    """``out = x @ weight.T + bias`` in the dtype of out; torch sums products of narrow dtypes in float32."""
    if weight.rounding is not None:
        x = quant.rounded_to_fp8(x, weight.rounding)
    torch.mm(x.to(out.dtype), weight.weight.t().to(out.dtype), out=out)
    if weight.bias is not None:
        out.add_(weight.bias)


def linear_add(residual: Tensor, delta: Tensor, x: Tensor, weight: Packed) -> None:
    """``residual += linear(x)``: the decomposition."""
    linear(delta, x, weight)
    residual.add_(delta)


def rms_norm_linear(out: Tensor, normed: Tensor, x: Tensor, norm: Tensor, eps: float, weight: Packed) -> None:
    """``out = linear(rms_norm(x))``: the decomposition."""
    rms_norm(normed, x, norm, eps)
    linear(out, normed, weight)


def gated_linear(out: Tensor, wide: Tensor, x: Tensor, weight: Packed, kind: str) -> None:
    """``out = gated_activation(linear(x), kind)``: the decomposition."""
    linear(wide, x, weight)
    gated_activation(out, wide, kind)


def rms_norm_gated_linear(
    out: Tensor, wide: Tensor, normed: Tensor, x: Tensor, norm: Tensor, eps: float, weight: Packed, kind: str
) -> None:
    """``out = gated_activation(linear(rms_norm(x)), kind)``: the decomposition."""
    rms_norm_linear(wide, normed, x, norm, eps, weight)
    gated_activation(out, wide, kind)
