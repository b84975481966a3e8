"""The product of many rows of `kernels/many_rows.cu`: its source for a tile, and its launch."""

from __future__ import annotations

import ctypes
from functools import lru_cache

from torch import Tensor

from vllm_cuda.launch import TensorMap, stream_of, tensor_map
from vllm_cuda.many_tiles import BOX_ROWS, CLUSTER, DEPTH, LEAD, LINES, THREADS, ManyForm, clusters_of
from vllm_cuda.programs import Program, defined, kernel_of

FILES = ("chip.cuh", "number.cuh", "hopper.cuh", "epilogue.cuh", "many_rows.cu")


@lru_cache(maxsize=256)
def program_of(form: ManyForm) -> Program:
    """What is compiled for a form: after the matrix instruction of its tile."""
    values = defined(
        ROWS=form.rows,
        STAGES=form.stages,
        LEAD=LEAD,
        EPILOGUE=form.epilogue,
        KIND=form.kind,
        BIAS=form.bias,
        HALF=form.half,
    )
    options = ("--gpu-architecture=sm_90a", "--std=c++17", *values)
    return Program("many_rows", FILES, options, form.shared_bytes, _multiply(form))


def _multiply(form: ManyForm) -> str:
    """``multiply``: sum [64, rows] (+)= a [64, 16] @ b [rows, 16].T, both in shared memory; the old sum counts if ``more``."""
    count, kind = form.rows // 2, "f16" if form.half else "bf16"
    registers = ", ".join(f"%{index}" for index in range(count))
    operands = ", ".join(f'"+f"(sum[{index}])' for index in range(count))
    return (
        f"__device__ __forceinline__ void multiply(float (&sum)[{count}], "
        "unsigned long long a, unsigned long long b, int more) {\n"
        f'asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{count + 2}, 0; '
        f"wgmma.mma_async.sync.aligned.m64n{form.rows}k16.f32.{kind}.{kind} {{{registers}}}, %{count}, %{count + 1}, "
        f'p, 1, 1, 0, 0; }}" : {operands} : "l"(a), "l"(b), "r"(more));\n}}\n'
    )


@lru_cache(maxsize=4096)
def _map_of(address: int, rows: int, columns: int, box_rows: int, half: bool) -> TensorMap:
    return tensor_map(address, rows, columns, columns, box_rows, DEPTH, half=half)


def launch(
    out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, form: ManyForm, height: int, multiprocessors: int
) -> None:
    """Queue it on the current stream: out [T,N] from x [T,K] and weight [N,K], or [2N,K] where gated, all contiguous.

    All are of one dtype, bfloat16 or float16. Rows begin at multiples of 16 bytes. Tiles go down ``height`` pairs at a time.
    The weight must not be written by the kernel before: it is read before that one has ended.
    """
    kernel = kernel_of(program_of(form), x.get_device())
    if kernel is None:
        return
    count, columns = x.shape
    kernel.launch(
        CLUSTER * clusters_of(count, weight.shape[0], form.rows, multiprocessors),
        THREADS,
        CLUSTER,
        stream_of(x.get_device()),
        _map_of(weight.data_ptr(), weight.shape[0], columns, form.rows // CLUSTER, form.half),
        _map_of(x.data_ptr(), count, columns, LINES, form.half),
        _map_of(out.data_ptr(), count, out.shape[1], BOX_ROWS, form.half),
        ctypes.c_void_p(None if bias is None else bias.data_ptr()),
        ctypes.c_int(count),
        ctypes.c_int(out.shape[1]),
        ctypes.c_int(height),
        ctypes.c_int(-(-columns // DEPTH)),
    )
