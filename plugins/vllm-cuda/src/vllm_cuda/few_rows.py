"""The product of few rows of `kernels/few_rows.cu`: its source for a tile, and its launch."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch
from torch import Tensor

from vllm_cuda.launch import TensorMap, tensor_map
from vllm_cuda.programs import Program, defined, kernel_of
from vllm_cuda.tiles import DEPTH, GATED, Form

FILES = ("chip.cuh", "hopper.cuh", "epilogue.cuh", "few_rows.cu")


@lru_cache(maxsize=4096)
def program_of(form: Form) -> Program:
    """What is compiled for a form: after the matrix instruction of its tile."""
    tile = form.tile
    values = defined(
        ROWS=tile.rows,
        BANDS=form.bands,
        CLUSTER=tile.cluster,
        STAGES=tile.stages,
        X_STAGES=tile.x_stages,
        EPILOGUE=form.epilogue,
        KIND=form.kind,
        BIAS=form.bias,
        WIDE_OUT=form.wide_out,
    )
    options = ("--gpu-architecture=sm_90a", "--std=c++17", *values)
    return Program("few_rows", FILES, options, form.shared_bytes, _multiply(tile.rows))


def _multiply(rows: int) -> str:
    """``multiply``: sum [64, rows] += a [64, 16] @ b [rows, 16].T, both in shared memory."""
    count = rows // 2
    registers = ", ".join(f"%{index}" for index in range(count))
    operands = ", ".join(f'"+f"(sum[{index}])' for index in range(count))
    return (
        f"__device__ __forceinline__ void multiply(float (&sum)[{count}], unsigned long long a, unsigned long long b) {{\n"
        f'asm volatile("wgmma.mma_async.sync.aligned.m64n{rows}k16.f32.bf16.bf16 {{{registers}}}, %{count}, %{count + 1}, '
        f'1, 1, 1, 0, 0;" : {operands} : "l"(a), "l"(b));\n}}\n'
    )


@lru_cache(maxsize=4096)
def _map_of(address: int, rows: int, columns: int, stride: int, box_rows: int) -> TensorMap:
    return tensor_map(address, rows, columns, stride, box_rows, DEPTH)


def launch(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, form: Form, multiprocessors: int) -> None:
    """Queue it on the current stream: out [T,N] from x [T,K] and weight [N,K], or [2N,K] where gated, all contiguous.

    T is 1 to 64 per band. Rows of x and of the weight begin at multiples of 16 bytes; N is even. The weight must not be
    written by the kernel before: it is read before that one has ended.
    """
    kernel = kernel_of(program_of(form), x.get_device())
    if kernel is None:
        return
    count, columns = x.shape
    tile, halves = form.tile, 2 if form.epilogue == GATED else 1
    rows, box_rows, x_rows = weight.shape[0] // halves, tile.rows // halves, -(-count // 8) * 8
    tiles = -(-rows // box_rows)
    kernel.launch(
        tiles * tile.cluster if tile.cluster > 1 else min(tiles, multiprocessors),
        form.threads,
        tile.cluster,
        torch.cuda.current_stream(x.device).cuda_stream,
        _map_of(weight.data_ptr(), weight.shape[0], columns, columns, box_rows),
        _map_of(x.data_ptr(), count, columns, columns, x_rows),
        ctypes.c_void_p(out.data_ptr()),
        ctypes.c_void_p(None if bias is None else bias.data_ptr()),
        ctypes.c_int(count),
        ctypes.c_int(rows),
        ctypes.c_int(-(-columns // DEPTH)),
        ctypes.c_int(tiles),
        ctypes.c_int(x_rows),
    )
