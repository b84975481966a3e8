"""References: the family ``linear``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_core.api.quant import Weight
from vllm_core.ops import quant
from vllm_core.ops.activation import gated_activation
from vllm_core.ops.norm import rms_norm


@dataclass(frozen=True, slots=True)
class Packed:
    """The reference's form of a weight: the tensors themselves. `readers` are the layers that use it."""

    weight: Tensor
    bias: Tensor | None
    readers: tuple[str, ...]

    @property
    def out_features(self) -> int:
        """Columns of the output."""
        return self.weight.shape[0]


def linear_pack(weight: Weight, bias: Tensor | None, readers: Sequence[str]) -> Packed:
    """Keep the tensors; a quantised weight is decoded to float32."""
    plain = weight if isinstance(weight, Tensor) else quant.decode(weight, torch.float32)
    return Packed(plain, bias, tuple(readers))


def linear(out: Tensor, x: Tensor, weight: Packed) -> None:
    """``out = x @ weight.T + bias`` in the dtype of out; torch sums products of narrow dtypes in float32."""
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
