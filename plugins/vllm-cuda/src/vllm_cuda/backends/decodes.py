"""Attention of single queries on Hopper (`kernels/decode.cu`): where it takes over. Imports no torch."""

from __future__ import annotations

from vllm_cuda.backends.hopper import PROGRAMS
from vllm_cuda.decode_tiles import KEYS, LANES, MOST_HEADS, Form, Fresh

HEAD_SIZE = 128
"""Of heads of 64, 64 rows of 32 and 8 heads with 256 tokens took 25.2 us by this kernel, 22.5 by the shared ones."""

ROWS = 8
"""Of a lane: a warp finds a program's part of what all its lanes have."""

MOST_UNITS = 256
"""Rows times KV heads: where more of them are read for long, programs that get less of the memory keep others waiting, and how
long rows are is not known where a step is captured."""

RING_BYTES = 160 << 10
"""Of shared memory of a program: with less a product's programs find room beside it, and a layer took longer."""

LEAST = 16
"""Boxes of keys that a program has where there are so many: fewer take less time than to put together what several found."""


def form_of(
    rows: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    tokens_per_block: int,
    half: bool,
    fresh: Fresh | None,
    multiprocessors: int,
) -> Form | None:
    """Form of `vllm_cuda.decode` for a step of so many rows, ``heads`` a KV head; None where the shared kernels were faster, or
    nothing was measured.

    Measured on an H200 in bfloat16, blocks of 64 tokens, norms, rotation and KV write included, between the products before and
    after attention, in a graph of layers with weights and caches of their own: microseconds of the three together, by this
    kernel and by the shared ones. Qwen3 8B, rows of 256 tokens: one 34.1, 36.1; 16: 34.1, 36.8; 64: 48.8, 50.9; 128: 67.2,
    70.7; 256: 115, 112. One of 1,000: 36.7, 37.2, of 32,700: 67.8, 69.4; four of 1,000: 34.5, 33.9; eight of 4,090: 62.0, 61.5;
    16 of 2,000: 65.6, 66.9; 32 of 1,000: 62.2, 63.4; but 64 of 500: 67.4, 64.7, of 1,000: 102, 99; 160 of 900: 195, 187.
    Qwen3 0.6B: one of 256: 11.7, 15.7, of 1,000: 14.1, 15.8; eight of 256: 14.7, 17.0; 64: 30.9, 32.4, of 1,000: 82.9, 82.2.
    A rank of eight of a model of 64 and 8 heads, 64 rows of 256: 15.8, 18.2, of 2,000: 31.9, 33.6.

    One row is not taken, although the three are faster so: in the whole engine 255 tokens of Qwen3 0.6B took 175 ms with it and
    without, and those of 8B 1,206 with it and 1,031 without. Products of one row read their weight through L1, of which a ring
    may leave too little to the kernels after it: not shown.
    """
    if not 2 <= rows <= ROWS * LANES or rows * kv_heads > MOST_UNITS or multiprocessors != PROGRAMS:
        return None
    if head_size != HEAD_SIZE or heads > MOST_HEADS or tokens_per_block % KEYS:
        return None
    if fresh is not None and not _turns(fresh, head_size):
        return None
    return Form(head_size, kv_heads, heads, tokens_per_block, ROWS, RING_BYTES, half, fresh)


def _turns(fresh: Fresh, head_size: int) -> bool:
    """Whether a thread has both numbers of all pairs that rotate."""
    return fresh.pairs % (8 if fresh.interleaved else 16) == 0 and 2 * fresh.pairs <= head_size
