"""Norms: `npu_rms_norm`, `npu_add_rms_norm`."""

from __future__ import annotations

import torch_npu
from torch import Tensor


def rms_norm(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """``out = x / sqrt(mean(x^2) + eps) * weight``; weight float32 [H] is read in x's dtype."""
    out.copy_(torch_npu.npu_rms_norm(x, weight.to(x.dtype), eps)[0])


def add_rms_norm(out: Tensor, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """``residual += x; out = rms_norm(residual)``."""
    normed, _, total = torch_npu.npu_add_rms_norm(residual, x, weight.to(x.dtype), eps)
    out.copy_(normed)
    residual.copy_(total)
