"""Attention of single queries by `kernels/decode.cu`: its source for a form, and its launch."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import torch
from torch import Tensor

from vllm_cuda.decode_tiles import KEYS, WARPS, Form
from vllm_cuda.launch import TensorMap, box_map
from vllm_cuda.programs import Program, defined, kernel_of
from vllm_triton.ops.cache import KV
from vllm_triton.ops.launch import Scratch

FILES = (
    *("chip.cuh", "ampere.cuh", "hopper.cuh"),
    *("decode.cuh", "decode_plan.cuh", "decode_bring.cuh", "decode_join.cuh", "decode.cu"),
)
PIECE = 64
"""Elements of a head that a row of a box has: 128 bytes, the span of the swizzle."""

LOG2E = 1.4426950408889634
"""Scores are kept in units of log2."""

PARTS_BYTES, COUNTS_BYTES = 2 << 20, 16 << 10
"""Of pieces of rows and KV heads that programs share, and of how many of them there are."""

_PARTS = Scratch(PARTS_BYTES)
_COUNTS = Scratch(COUNTS_BYTES, zero=True)


@dataclass(frozen=True, slots=True)
class NewTokens:
    """What `qk_norm_rope_attention` has beside attention: k and v [T,Hk,D], norms' float32 weights [D], int32 positions [T],
    float32 cos_sin [P,2,R/2] and whether it turns neighbours, int64 slots [T]."""

    k: Tensor
    v: Tensor
    q_weight: Tensor | None
    k_weight: Tensor | None
    eps: float
    positions: Tensor
    cos_sin: Tensor | None
    interleaved: bool
    slots: Tensor


class _Given(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("out", "q", "k", "v", "q_weight", "k_weight", "cos_sin", "positions", "slots")),
        *((name, ctypes.c_void_p) for name in ("blocks", "block_table", "query_start", "seq_lens", "partial", "counts")),
        ("block_stride", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("q_token", "q_head", "k_token", "k_head", "v_token", "v_head")),
        *((name, ctypes.c_int) for name in ("out_token", "out_head", "table_stride", "rows", "tokens")),
        *((name, ctypes.c_int) for name in ("longest", "least")),
        *((name, ctypes.c_float) for name in ("scale", "eps")),
    )


@lru_cache(maxsize=1024)
def program_of(form: Form) -> Program:
    """What is compiled for a form."""
    fresh = form.fresh
    values = defined(
        D=form.head_size,
        G=form.heads,
        HK=form.kv_heads,
        TPB=form.tokens_per_block,
        ROWS=form.rows,
        STAGES=form.stages,
        WARPS=WARPS,
        HALF=form.half,
        FRESH=fresh is not None,
        NORM=fresh is not None and fresh.norm,
        ROPE=fresh is not None and fresh.pairs > 0,
        HALF_ROPE=fresh.pairs if fresh else 0,
        INTERLEAVED=fresh is not None and fresh.interleaved,
    )
    return Program("decode", FILES, ("--gpu-architecture=sm_90a", "--std=c++17", *values), form.shared_bytes)


@lru_cache(maxsize=4096)
def _cache_map(address: int, blocks: int, block_stride: int, form: Form) -> TensorMap:
    """Boxes [2, pieces, tokens, 64] of keys and values of one head in one block."""
    lines, pieces = form.kv_heads * form.tokens_per_block, form.head_size // PIECE
    sizes, strides = (PIECE, lines, pieces, 2, blocks), (form.head_size, PIECE, lines * form.head_size, block_stride)
    return box_map(address, sizes, strides, (PIECE, KEYS, pieces, 2, 1), half=form.half)


def given_of(
    out: Tensor,
    q: Tensor,
    kv: KV,
    query_start: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    scale: float,
    new: NewTokens | None,
    least: int,
    partial: Tensor,
    counts: Tensor,
) -> ctypes.Structure:
    """What the kernel is given: addresses, strides in elements, sizes."""
    k, v, *rest = _rest(new, q)
    tensors = (out, q, k, v, *rest, kv.blocks, block_table, query_start, seq_lens, partial, counts)
    return _Given(
        *(None if one is None else one.data_ptr() for one in tensors),
        kv.block_stride,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        *out.stride()[:2],
        block_table.stride(0),
        seq_lens.shape[0],
        q.shape[0],
        block_table.shape[1] * kv.tokens_per_block,
        least,
        scale * LOG2E,
        0.0 if new is None else new.eps,
    )


_Rest: TypeAlias = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def _rest(new: NewTokens | None, q: Tensor) -> _Rest:
    if new is None:
        return q, q, None, None, None, None, None
    return new.k, new.v, new.q_weight, new.k_weight, new.cos_sin, new.positions, new.slots


def launch(
    out: Tensor,
    q: Tensor,
    kv: KV,
    query_start: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    scale: float,
    new: NewTokens | None,
    form: Form,
    least: int,
    programs: int,
) -> None:
    """Queue it on the current stream: q and out [T,Hq,D], rows of one query; other rows of out stay as they are.

    Elements of q, k, v, out and of the cache begin at multiples of 16 bytes, and so do their tokens, heads and blocks, and the
    rows of ``new.cos_sin``, query_start and seq_lens. ``least``: boxes of a program, where there are so many.
    """
    kernel = kernel_of(program_of(form), q.get_device())
    if kernel is None:
        return
    scratch = _PARTS.get(q.device), _COUNTS.get(q.device)
    kernel.launch(
        programs,
        form.threads,
        1,
        torch.cuda.current_stream(q.device).cuda_stream,
        _cache_map(kv.blocks.data_ptr(), kv.blocks.shape[0], kv.block_stride, form),
        given_of(out, q, kv, query_start, seq_lens, block_table, scale, new, least, *scratch),
    )
