"""Norms."""

from __future__ import annotations

from torch import Tensor

from vllm_triton.kernels import norm
from vllm_triton.ops.launch import Launch, power_of_2, settled
from vllm_triton.tuning import active


def rms_norm(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """``out = x / sqrt(mean(x^2) + eps) * weight`` over the last dimension of [T,H] or [T,heads,H]; out may be x."""
    count, shape = x.numel(), x.shape
    if not count:
        return
    if len(shape) not in (2, 3):
        rms_norm(out.view(-1, shape[-1]), x.reshape(-1, shape[-1]), weight, eps)
        return
    launch = _rms_norm(shape[1:], out.stride(), x.stride(), eps)
    launch.start((count // shape[-1], 1, 1), out, x, weight)


@settled
def _rms_norm(shape: tuple[int, ...], out: tuple[int, ...], x: tuple[int, ...], eps: float) -> Launch:
    """Rows [H] or [heads, H] of the tensors that have these strides."""
    (out_outer, out_inner), (x_outer, x_inner) = ((*strides[:-1], 0)[:2] for strides in (out, x))
    strides = {"out_outer": out_outer, "out_inner": out_inner, "x_outer": x_outer, "x_inner": x_inner}
    return Launch(norm.rms_norm, eps=eps, inner=shape[0] if len(shape) == 2 else 1, **strides, **_options(shape[-1]))


def add_rms_norm(out: Tensor, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """``residual += x; out = rms_norm(residual)``; all [T,H]."""
    rows, size = x.shape
    if rows:
        _add_rms_norm(size, eps).start((rows, 1, 1), out, residual, x.contiguous(), weight)


@settled
def _add_rms_norm(size: int, eps: float) -> Launch:
    return Launch(norm.add_rms_norm, eps=eps, **_options(size))


def layer_norm(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> None:
    """``out = (x - mean) / sqrt(variance + eps) * weight + bias`` over the last dimension of [T,H]; out may be x."""
    rows, size = x.shape
    if rows:
        _layer_norm(size, out.stride(0), x.stride(0), eps).start((rows, 1, 1), out, x, weight, bias)


@settled
def _layer_norm(size: int, out_row: int, x_row: int, eps: float) -> Launch:
    return Launch(norm.layer_norm, eps=eps, out_row=out_row, x_row=x_row, **_options(size))


def _options(size: int) -> dict[str, int]:
    block = power_of_2(size)
    return {"SIZE": size, "BLOCK": block, "num_warps": max(1, min(16, block // 256)), **active().dependent}
