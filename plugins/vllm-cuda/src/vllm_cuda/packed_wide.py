"""Products of many rows with packed weights on Hopper (`kernels/packed_wide.cu`)."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch
from torch import Tensor

from vllm_cuda.packed import Packed
from vllm_cuda.packed_rows import layout_values, weight_arguments
from vllm_cuda.packed_tiles import WideForm
from vllm_cuda.programs import Program, defined, kernel_of
from vllm_triton.ops.launch import Scratch

FILES = (
    "chip.cuh",
    "ampere.cuh",
    "hopper.cuh",
    "packed_hopper.cuh",
    "epilogue.cuh",
    "packed.cuh",
    "packed_finish.cuh",
    "packed_wide.cu",
)

PARTS_BYTES = 24 << 20
"""Of sums that programs leave to one another, those of a launch."""

LOCKS_BYTES = 4 << 10
"""Of locks, one a tile."""

_PARTS, _LOCKS = Scratch(PARTS_BYTES), Scratch(LOCKS_BYTES, zero=True)


@lru_cache(maxsize=4096)
def program_of(form: WideForm) -> Program:
    """What is compiled for a form: after the matrix instruction of its tile."""
    tile = form.tile
    values = defined(
        **layout_values(form.layout),
        HALF=form.half,
        GROUPS=tile.groups,
        BANDS=tile.bands,
        TILES=tile.columns,
        SHARES=tile.shares,
        STAGES=tile.stages,
        EPILOGUE=form.epilogue,
        KIND=form.kind,
        BIAS=form.bias,
        WIDE_OUT=form.wide_out,
    )
    options = ("--gpu-architecture=sm_90a", "--std=c++17", *values)
    return Program("packed_wide", FILES, options, form.shared_bytes, _multiply(tile.columns, form.half))


def _multiply(columns: int, half: bool) -> str:
    """``multiply``: sum [64, 8 columns] += a [64, 16] @ b [8 columns, 16].T, a in registers, b in shared memory; or = that."""
    count, number = columns * 4, "f16" if half else "bf16"
    registers = ", ".join(f"%{index}" for index in range(count))
    operands = ", ".join(f'"+f"(sum[{index}])' for index in range(count))
    weight = ", ".join(f"%{count + index}" for index in range(4))
    return (
        f"__device__ __forceinline__ void multiply(float (&sum)[{count}], unsigned a0, unsigned a1, unsigned a2, unsigned a3, "
        f"unsigned long long b, bool more) {{\n"
        f'asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{count + 5}, 0; '
        f"wgmma.mma_async.sync.aligned.m64n{8 * columns}k16.f32.{number}.{number} {{{registers}}}, {{{weight}}}, %{count + 4}, "
        f'p, 1, 1, 0; }}" : {operands} : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"((int)more));\n}}\n'
    )


def launch(out: Tensor, x: Tensor, weight: Packed, form: WideForm) -> None:
    """Queue it on the current stream: out [T,N] from x [T,K], whose rows are contiguous and begin at multiples of 16 bytes.

    out is contiguous. The weight must not be written by the kernel before. Where programs share tiles, all of them have room on
    the chip at once, one a multiprocessor.
    """
    kernel = kernel_of(program_of(form), x.get_device())
    if kernel is None:
        return
    count, rows = out.shape
    kernel.launch(
        programs_of(form, count, rows),
        form.threads,
        1,
        torch.cuda.current_stream(x.device).cuda_stream,
        *weight_arguments(weight),
        ctypes.c_void_p(x.data_ptr()),
        ctypes.c_void_p(out.data_ptr()),
        ctypes.c_void_p(None if weight.bias is None else weight.bias.data_ptr()),
        ctypes.c_int(count),
        ctypes.c_int(rows),
        ctypes.c_int(weight.columns),
        ctypes.c_int(x.stride(0)),
        ctypes.c_void_p(_PARTS.get(x.device).data_ptr()),
        ctypes.c_void_p(_LOCKS.get(x.device).data_ptr()),
    )


def programs_of(form: WideForm, count: int, rows: int) -> int:
    """Programs of a launch for out [count, rows]."""
    tile = form.tile
    return -(-rows // form.out_rows) * -(-count // (8 * tile.columns)) * tile.shares
