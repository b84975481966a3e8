"""References: norms and the residual add. Statistics are float32 whatever the dtype."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def add(out: Tensor, a: Tensor, b: Tensor) -> None:
    """``out = a + b``."""
    torch.add(a, b, out=out)


def rms_norm(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """``out = x / sqrt(mean(x^2) + eps) * weight`` over the last dimension."""
    wide = x.float()
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    out.copy_(scale.mul(wide).mul_(weight))


def add_rms_norm(out: Tensor, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """``residual += x; out = rms_norm(residual)``: the decomposition."""
    add(residual, residual, x)
    rms_norm(out, residual, weight, eps)


def layer_norm(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> None:
    """``out = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias``; the variance is the biased one."""
    out.copy_(functional.layer_norm(x.float(), weight.shape, weight, bias, eps))
