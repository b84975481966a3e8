"""Products with packed weights (`kernels/packed_rows.cu`), and these weights widened (`kernels/packed_whole.cu`)."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch
from torch import Tensor

from vllm_cuda.chip import depends
from vllm_cuda.packed import Packed
from vllm_cuda.packed_tiles import BLOCK, DEPTH, Layout, PackedForm
from vllm_cuda.programs import Program, defined, kernel_of

ROWS_FILES = ("chip.cuh", "ampere.cuh", "epilogue.cuh", "packed.cuh", "packed_finish.cuh", "packed_rows.cu")
WHOLE_FILES = ("chip.cuh", "ampere.cuh", "packed.cuh", "packed_whole.cu")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@lru_cache(maxsize=4096)
def rows_program(form: PackedForm, architecture: str) -> Program:
    """What is compiled for a form, for a chip such as ``sm_90``."""
    tile = form.tile
    values = defined(
        **layout_values(form.layout),
        HALF=form.half,
        ROW_WARPS=tile.row_warps,
        PARTS=tile.parts,
        BLOCKS=tile.blocks,
        TILES=form.columns,
        CLUSTER=tile.cluster,
        STAGES=tile.stages,
        RESIDENT=tile.resident,
        EPILOGUE=form.epilogue,
        KIND=form.kind,
        BIAS=form.bias,
        WIDE_OUT=form.wide_out,
        DIRECT=tile.direct,
        DEPENDENT=depends(architecture),
    )
    return Program("packed_rows", ROWS_FILES, (*_options(architecture), *values), form.shared_bytes)


@lru_cache(maxsize=4096)
def whole_program(layout: Layout, dtype: torch.dtype, architecture: str) -> Program:
    """What is compiled to widen a layout to bfloat16 or float16."""
    values = defined(**layout_values(layout), HALF=dtype == torch.float16, DEPENDENT=depends(architecture))
    return Program("packed_whole", WHOLE_FILES, (*_options(architecture), *values), 0)


def _options(architecture: str) -> tuple[str, ...]:
    return (f"--gpu-architecture={architecture}", "--std=c++17")


def layout_values(layout: Layout) -> dict[str, int]:
    """What `kernels/packed.cuh` is told of a layout."""
    return {"FORMAT": layout.format, "SETS": layout.sets, "SCALE": layout.scale, "ZEROS": layout.zeros}


def launch(out: Tensor, x: Tensor, weight: Packed, form: PackedForm, architecture: str) -> None:
    """Queue it on the current stream: out [T,N] from x [T,K], whose rows are contiguous and begin at multiples of 16 bytes.

    T is at most 8 ``form.columns``; out is contiguous. The weight must not be written by the kernel before.
    """
    kernel = kernel_of(rows_program(form, architecture), x.get_device())
    if kernel is None:
        return
    count, rows = out.shape
    kernel.launch(
        -(-rows // form.out_rows) * form.tile.cluster,
        form.threads,
        form.tile.cluster,
        torch.cuda.current_stream(x.device).cuda_stream,
        *weight_arguments(weight),
        ctypes.c_void_p(x.data_ptr()),
        ctypes.c_void_p(out.data_ptr()),
        ctypes.c_void_p(None if weight.bias is None else weight.bias.data_ptr()),
        ctypes.c_int(count),
        ctypes.c_int(rows),
        ctypes.c_int(weight.columns),
        ctypes.c_int(x.stride(0)),
        dependent=depends(architecture),
    )


def widened(weight: Packed, dtype: torch.dtype, architecture: str) -> Tensor:
    """The matrix [N,K] in ``dtype``."""
    out = torch.empty((weight.rows, weight.columns), dtype=dtype, device=weight.codes.device)
    kernel = kernel_of(whole_program(weight.layout, dtype, architecture), out.get_device())
    if kernel is None:
        return out
    warps, records = 4, -(-weight.columns // DEPTH)
    kernel.launch(
        -(-(-(-weight.rows // BLOCK) * records) // warps),
        warps * 32,
        1,
        torch.cuda.current_stream(out.device).cuda_stream,
        *weight_arguments(weight),
        ctypes.c_void_p(out.data_ptr()),
        ctypes.c_int(weight.rows),
        ctypes.c_int(weight.columns),
        dependent=depends(architecture),
    )
    return out


def weight_arguments(weight: Packed) -> tuple[ctypes.c_void_p, ...]:
    """The first arguments of a kernel that reads a packed weight."""
    return tuple(ctypes.c_void_p(one.data_ptr()) for one in (weight.codes, weight.scales, weight.row_scale))
