"""The product of few rows of `kernels/few_rows.cu`: its source for a tile, and its launch."""

from __future__ import annotations

import ctypes
from functools import lru_cache

from torch import Tensor

from vllm_cuda.launch import TensorMap, box_map, stream_of, tensor_map
from vllm_cuda.programs import Program, defined, kernel_of
from vllm_cuda.tiles import DEPTH, GATED, Form, Tile

FILES = ("chip.cuh", "hopper.cuh", "epilogue.cuh", "few_rows.cu")


@lru_cache(maxsize=4096)
def program_of(form: Form) -> Program:
    """What is compiled for a form: after the matrix instruction of its tile."""
    tile = form.tile
    values = defined(
        GROUPS=tile.groups,
        ROWS=tile.rows,
        TOKENS=tile.tokens,
        PARTS=tile.parts,
        STAGES=tile.stages,
        TRADE=tile.trade,
        LATE=tile.late,
        EPILOGUE=form.epilogue,
        KIND=form.kind,
        BIAS=form.bias,
    )
    options = ("--gpu-architecture=sm_90a", "--std=c++17", *values)
    return Program("few_rows", FILES, options, form.shared_bytes, _multiply(tile))


def _multiply(tile: Tile) -> str:
    """``multiply``: sum [64, tokens] (+)= a [64, 16] @ b [tokens, 16].T, of shared memory; the old sum counts if ``more``."""
    tokens = tile.tokens // tile.products
    count = tokens // 2
    registers = ", ".join(f"%{index}" for index in range(count))
    lines = []
    for part in range(tile.products):
        operands = ", ".join(f'"+f"(sum[{part * count + index}])' for index in range(count))
        # Descriptors count in 16 bytes; a row of x is 128.
        lines.append(
            f'asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{count + 2}, 0; '
            f"wgmma.mma_async.sync.aligned.m64n{tokens}k16.f32.bf16.bf16 {{{registers}}}, %{count}, %{count + 1}, "
            f'p, 1, 1, 0, 0; }}" : {operands} : "l"(a), "l"(b + {part * tokens * 8}), "r"(more));\n'
        )
    head = f"float (&sum)[{tile.tokens // 2}], unsigned long long a, unsigned long long b, int more"
    return f"__device__ __forceinline__ void multiply({head}) {{\n{''.join(lines)}}}\n"


@lru_cache(maxsize=4096)
def _map_of(address: int, rows: int, columns: int, box_rows: int) -> TensorMap:
    return tensor_map(address, rows, columns, columns, box_rows, DEPTH)


@lru_cache(maxsize=4096)
def _map_of_pairs(address: int, rows: int, columns: int, box_rows: int) -> TensorMap:
    """Of [2, rows, columns] as columns, eight rows, two halves, eights."""
    sizes, strides = (columns, 8, 2, rows // 8), (columns, rows * columns, 8 * columns)
    return box_map(address, sizes, strides, (DEPTH, 8, 2, box_rows // 16), half=False)


def launch(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, form: Form, multiprocessors: int) -> None:
    """Queue it on the current stream: out [T,N] from x [T,K] and weight [N,K], or [2N,K] where gated, all contiguous bfloat16.

    Rows of x and of the weight begin at multiples of 16 bytes; N is a multiple of 8. The
    weight must not be written by the kernel before: it is read before that one has ended.
    """
    kernel = kernel_of(program_of(form), x.get_device())
    if kernel is None:
        return
    count, columns = x.shape
    tile, rows, gated = form.tile, out.shape[1], form.epilogue == GATED
    spans = -(-count // tile.tokens)
    tiles, x_rows = -(-weight.shape[0] // tile.rows) * spans, min(tile.tokens, -(-count // 8) * 8)
    kernel.launch(
        tiles * tile.parts if tile.parts > 1 else min(tiles, multiprocessors),
        form.threads,
        tile.parts,
        stream_of(x.get_device()),
        (_map_of_pairs if gated else _map_of)(weight.data_ptr(), rows, columns, tile.rows),
        _map_of(x.data_ptr(), count, columns, x_rows),
        ctypes.c_void_p(out.data_ptr()),
        ctypes.c_void_p(None if bias is None else bias.data_ptr()),
        ctypes.c_int(count),
        ctypes.c_int(rows),
        ctypes.c_int(-(-columns // DEPTH)),
        ctypes.c_int(tiles),
        ctypes.c_int(spans),
        ctypes.c_int(x_rows),
    )
