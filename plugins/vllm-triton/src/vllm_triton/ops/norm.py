"""Norms."""

from __future__ import annotations

from torch import Tensor

from vllm_triton.kernels import norm
from vllm_triton.ops.launch import power_of_2
from vllm_triton.tuning import active


def rms_norm(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """``out = x / sqrt(mean(x^2) + eps) * weight`` over the last dimension of [T,H] or [T,heads,H]; out may be x."""
    size = x.shape[-1]
    rows = x.numel() // size if size else 0
    if not rows:
        return
    if x.dim() == 3:
        inner, strides = x.shape[1], (*out.stride()[:2], *x.stride()[:2])
    else:
        x, out = x.reshape(-1, size), out if out.dim() == 2 else out.view(-1, size)
        inner, strides = 1, (out.stride(0), 0, x.stride(0), 0)
    block = power_of_2(size)
    dependent = active().dependent
    norm.rms_norm[(rows,)](out, x, weight, eps, inner, *strides, SIZE=size, BLOCK=block, num_warps=_warps(block), **dependent)


def add_rms_norm(out: Tensor, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """``residual += x; out = rms_norm(residual)``; all [T,H]."""
    rows, size = x.shape
    if not rows:
        return
    block = power_of_2(size)
    dependent = active().dependent
    norm.add_rms_norm[(rows,)](
        out, residual, x.contiguous(), weight, eps, SIZE=size, BLOCK=block, num_warps=_warps(block), **dependent
    )


def layer_norm(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> None:
    """``out = (x - mean) / sqrt(variance + eps) * weight + bias`` over the last dimension of [T,H]; out may be x."""
    rows, size = x.shape
    if not rows:
        return
    block = power_of_2(size)
    strides = (out.stride(0), x.stride(0))
    warps = _warps(block)
    norm.layer_norm[(rows,)](out, x, weight, bias, eps, *strides, SIZE=size, BLOCK=block, num_warps=warps, **active().dependent)


def _warps(block: int) -> int:
    return max(1, min(16, block // 256))
