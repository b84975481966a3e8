"""Norms through the C ABI. Oracle: `vllm_core.ops.norm`."""

from __future__ import annotations

from math import prod

from torch import Tensor

from vllm_cpu.ops.native_call import DTYPES, function, packer

_pack = packer("PPPPPqqqqqqd")
_rms_norm, _add_rms_norm, _layer_norm = map(function, ("rms_norm", "add_rms_norm", "layer_norm"))


def rms_norm(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """``out = x / sqrt(mean(x^2) + eps) * weight`` over the last dimension; out may be x."""
    outer, *middle, size = x.shape
    inner = prod(middle)
    strides = out.stride()[0], x.stride()[0]
    pointers = out.data_ptr(), x.data_ptr(), 0, weight.data_ptr(), 0
    _rms_norm(_pack(0, *pointers, outer, inner, size, *strides, DTYPES[x.dtype], eps), out, x, weight)


def add_rms_norm(out: Tensor, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """``residual += x; out = rms_norm(residual)``."""
    outer, size = x.shape
    pointers = out.data_ptr(), x.data_ptr(), residual.data_ptr(), weight.data_ptr(), 0
    _add_rms_norm(_pack(0, *pointers, outer, 1, size, size, x.stride()[0], DTYPES[x.dtype], eps), out, residual, x, weight)


def layer_norm(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> None:
    """``out = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias``; out may be x."""
    outer, size = x.shape
    pointers = out.data_ptr(), x.data_ptr(), 0, weight.data_ptr(), bias.data_ptr()
    _layer_norm(_pack(0, *pointers, outer, 1, size, out.stride()[0], x.stride()[0], DTYPES[x.dtype], eps), out, x, weight, bias)
