"""Ops of a native library, called through the C ABI. Oracle: core's references."""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from vllm_core.api import UnsupportedError
from vllm_cpu.native import CTensor, find

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int32: 3, torch.int64: 4}


@cache
def _library() -> ctypes.CDLL:
    found = find()
    assert found.library is not None, f"offered without a library: {found}"
    return found.library


def _tensor(value: Tensor) -> CTensor:
    result = CTensor(data=value.data_ptr(), rank=value.dim(), dtype=_DTYPES[value.dtype])
    for axis, (size, stride) in enumerate(zip(value.shape, value.stride(), strict=True)):
        result.sizes[axis], result.strides[axis] = size, stride
    return result


def rms_norm(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """``out = x / sqrt(mean(x^2) + eps) * weight``. Raises UnsupportedError with the library's status."""
    tensors = [ctypes.byref(_tensor(value)) for value in (out, x, weight)]
    status = _library().vllm_rms_norm(*tensors, ctypes.c_double(eps), None)
    if status:
        raise UnsupportedError(
            "Native op failed",
            on=f"vllm_rms_norm, {x.dtype} {tuple(x.shape)}",
            found=f"status {status}",
            expected="status 0",
            fix="--deny-provider vllm-cpu-native, and report it to the library's authors",
        )
