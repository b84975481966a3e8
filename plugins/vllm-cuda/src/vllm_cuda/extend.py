"""Attention of prompts by `kernels/extend.cu`: its source for a form, and its launch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache

from torch import Tensor

from vllm_cuda.decode import LOG2E
from vllm_cuda.extend_tiles import Form
from vllm_cuda.launch import TensorMap, box_map, stream_of
from vllm_cuda.programs import Program, defined, kernel_of
from vllm_triton.ops.cache import KV

FILES = ("chip.cuh", "number.cuh", "hopper.cuh", "extend.cuh", "extend_tiles.cuh", "extend_bring.cuh", "extend.cu")
PIECE = 64
"""Elements of a head that a box has: 128 bytes, the span of the swizzle."""


@lru_cache(maxsize=1024)
def program_of(form: Form) -> Program:
    """What is compiled for a form: after its matrix instructions."""
    tile, (consumer, producer) = form.tile, form.tile.registers
    values = defined(
        D=form.head_size,
        G=form.heads,
        HK=form.kv_heads,
        TPB=form.tokens_per_block,
        GROUPS=tile.groups,
        KEYS=tile.keys,
        STAGES=tile.stages,
        TURNS=tile.turns,
        SPLIT=tile.split,
        SINGLES=form.singles,
        WINDOW=form.window,
        SINKS=form.sinks,
        HALF=form.half,
        CONSUMER=consumer,
        PRODUCER=producer,
    )
    kind = "f16" if form.half else "bf16"
    products = "".join(
        _score(f"{name}{half}", tile.keys, count, kind, keep)
        for half, count in (("", tile.keys), ("_half", tile.keys // 2))
        for name, keep in (("score_first", 0), ("score", 1))
    ) + _weigh(form.head_size, kind)
    return Program("extend", FILES, ("--gpu-architecture=sm_90a", "--std=c++17", *values), form.shared_bytes, products)


def _score(name: str, keys: int, some: int, kind: str, keep: int) -> str:
    """sum [64, some] (+)= a [64, 16] @ b [some, 16].T, both in shared memory; the sum has place for ``keys``."""
    count = some // 2
    registers, operands = _sums(count)
    return (
        f"__device__ __forceinline__ void {name}(float (&sum)[{keys // 2}], unsigned long long a, unsigned long long b) {{\n"
        f'asm volatile("wgmma.mma_async.sync.aligned.m64n{some}k16.f32.{kind}.{kind} {{{registers}}}, %{count}, %{count + 1}, '
        f'{keep}, 1, 1, 0, 0;" : {operands} : "l"(a), "l"(b));\n}}\n'
    )


def _weigh(size: int, kind: str) -> str:
    """``weigh``: sum [64, size] += weights [64, 16] in registers @ b [16, size] in shared memory."""
    count = size // 2
    registers, operands = _sums(count)
    weights = ", ".join(f"%{count + index}" for index in range(4))
    return (
        f"__device__ __forceinline__ void weigh(float (&sum)[{count}], unsigned a, unsigned b, unsigned c, unsigned d, "
        f"unsigned long long values) {{\n"
        f'asm volatile("wgmma.mma_async.sync.aligned.m64n{size}k16.f32.{kind}.{kind} {{{registers}}}, {{{weights}}}, '
        f'%{count + 4}, 1, 1, 1, 1;" : {operands} : "r"(a), "r"(b), "r"(c), "r"(d), "l"(values));\n}}\n'
    )


def _sums(count: int) -> tuple[str, str]:
    """Registers of sums as an instruction names them, and as its operands."""
    return ", ".join(f"%{index}" for index in range(count)), ", ".join(f'"+f"(sum[{index}])' for index in range(count))


@lru_cache(maxsize=4096)
def _queries_map(address: int, tokens: int, heads: int, token_stride: int, head_stride: int, form: Form) -> TensorMap:
    """Boxes of a group's queries [queries, heads of a KV head, 64]."""
    sizes = (form.head_size, heads, tokens)
    return box_map(address, sizes, (head_stride, token_stride), (PIECE, form.heads, form.queries), half=form.half)


@lru_cache(maxsize=4096)
def _cache_map(address: int, blocks: int, block_stride: int, form: Form) -> TensorMap:
    """Boxes of keys or values [tokens, 64] of one head in one block."""
    sizes = (form.head_size, 2 * form.kv_heads * form.tokens_per_block, blocks)
    box = (PIECE, min(form.tokens_per_block, form.tile.keys), 1)
    return box_map(address, sizes, (form.head_size, block_stride), box, half=form.half)


def launch(
    out: Tensor,
    q: Tensor,
    kv: KV,
    query_start: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    max_seq_len: int,
    scale: float,
    window: int,
    sinks: Tensor | None,
    form: Form,
    others: Sequence[Form],
    multiprocessors: int,
) -> None:
    """Queue it on the current stream: q and out [T,Hq,D], rows of several queries; other rows of out stay as they are.

    Elements of q, of out and of the cache begin at multiples of 16 bytes, and so do their tokens, heads and blocks; sinks are
    float32 [Hq]. ``others`` are forms that steps of other sizes take: a rehearsal has them compiled, too.
    """
    kernel = kernel_of(program_of(form), q.get_device())
    if kernel is None:
        for other in others:
            kernel_of(program_of(other), q.get_device())
        return
    (tokens, heads, _), num_rows = q.shape, seq_lens.shape[0]
    tiles = tokens // (form.bands * form.queries) + num_rows
    kernel.launch(
        min(tiles * form.kv_heads, multiprocessors),
        form.threads,
        1,
        stream_of(q.get_device()),
        _queries_map(q.data_ptr(), tokens, heads, *q.stride()[:2], form),
        _cache_map(kv.blocks.data_ptr(), kv.blocks.shape[0], kv.block_stride, form),
        *(ctypes.c_void_p(one.data_ptr()) for one in (out, block_table, query_start, seq_lens)),
        ctypes.c_int(num_rows),
        ctypes.c_int(kv.blocks.shape[0]),
        ctypes.c_int(max_seq_len),
        ctypes.c_int(block_table.stride(0)),
        *(ctypes.c_int(size) for size in out.stride()[:2]),
        ctypes.c_float(scale * LOG2E),
        ctypes.c_int(window),
        ctypes.c_void_p(None if sinks is None else sinks.data_ptr()),
    )
