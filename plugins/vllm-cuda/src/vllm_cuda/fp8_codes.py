"""Weights in fp8 as the matrices that they were (`kernels/fp8_codes.cu`): for libraries, which know no other order."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch
from torch import Tensor

from vllm_cuda.chip import depends
from vllm_cuda.packed import Packed
from vllm_cuda.packed_tiles import BLOCK, DEPTH
from vllm_cuda.programs import Program, defined, kernel_of

FILES = ("chip.cuh", "fp8_codes.cu")
_WARPS = 4


@lru_cache(maxsize=64)
def program(architecture: str) -> Program:
    """What is compiled for a chip such as ``sm_90``."""
    options = (f"--gpu-architecture={architecture}", "--std=c++17", *defined(DEPENDENT=depends(architecture)))
    return Program("fp8_codes", FILES, options, 0)


def whole(weight: Packed, architecture: str) -> Tensor:
    """The codes float8_e4m3fn [N,K] of a weight in fp8."""
    out = torch.empty((weight.rows, weight.columns), dtype=torch.float8_e4m3fn, device=weight.codes.device)
    kernel = kernel_of(program(architecture), out.get_device())
    if kernel is not None:
        kernel.launch(
            -(-(-(-weight.rows // BLOCK) * -(-weight.columns // DEPTH)) // _WARPS),
            _WARPS * 32,
            1,
            torch.cuda.current_stream(out.device).cuda_stream,
            ctypes.c_void_p(weight.codes.data_ptr()),
            ctypes.c_void_p(out.data_ptr()),
            ctypes.c_int(weight.rows),
            ctypes.c_int(weight.columns),
            dependent=depends(architecture),
        )
    return out
