"""All layers at once on Hopper (`kernels/flat.cu`): its offers, and the steps that it takes. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from vllm_core.api import CallSite, Offer, Verdict
from vllm_cuda.backends import prompts
from vllm_cuda.backends.families import HOPPER
from vllm_cuda.backends.hopper import PROGRAMS, SHARED_BYTES
from vllm_cuda.flat_tiles import WORD_BYTES, WORDS_BYTES, Form, Work

HEAD_SIZES = frozenset({64, 128})
MOST_ROWS, MOST_GROUP = 4, 4
"""Rows of a step: eight columns of the matrix instruction are those of four, twice. Query heads of a KV head: a lane keeps what
it has of all of them in registers."""

COLUMNS = 64
"""Of a weight: two halves of 32, which a step of the instruction's reads at once."""

SMALL = 2048
"""Hidden features below which programs wait for one another more than for the memory."""

_SMALL, _LARGE = Work(10, 2, 1, 4, 64), Work(9, 3, 2, 2, 64)


@lru_cache(maxsize=1024)
def form_of(
    rows: int,
    sizes: tuple[int, int, int, int, int],
    layers: int,
    norm: bool,
    tokens_per_block: int,
    multiprocessors: int,
) -> Form | None:
    """Form of `vllm_cuda.flat` for a step of so many rows; None where layer after layer is faster, or nothing was measured.

    ``sizes``: hidden and inner features, heads, KV heads, features of a head.

    Measured on an H200, all layers of rows of 256 tokens in a graph, microseconds. Qwen3 0.6B: one row 358, with other numbers
    of warps, bringers and stages on their way 352 to 429, with pieces of 32 or 128 keys 362 and 390; two 369, four 420. Qwen3
    8B: one 3,261, with three stages of each bringer on their way 3,712, with one 4,059, with two bringers 3,390 to 3,476; two
    3,361, four 3,754. Layer by layer a whole step took 1.50, 1.64, 1.51 and 1.12, 1.12, 1.01 times as long.
    """
    hidden, inner, heads, kv_heads, head_size = sizes
    group = heads // kv_heads
    if not 1 <= rows <= MOST_ROWS or multiprocessors != PROGRAMS or head_size not in HEAD_SIZES or group > MOST_GROUP:
        return None
    if any(columns % COLUMNS for columns in (hidden, inner, heads * head_size)):
        return None
    work = _SMALL if hidden < SMALL else _LARGE
    if group > 2:
        work = replace(work, deep=2)
    programs = min(PROGRAMS, hidden, inner // 2)
    padded = 1 << (rows - 1).bit_length()
    form = Form(hidden, inner, heads, kv_heads, head_size, layers, norm, tokens_per_block, padded, programs, SHARED_BYTES, work)
    fits = form.stages > work.flying * work.bringers and sum(form.words) * WORD_BYTES <= WORDS_BYTES
    return form if fits and padded * kv_heads <= programs else None


def offer(provider: str, accepts: Callable[[CallSite], Verdict]) -> Offer:
    """All layers at once, where weights and KV are plain bfloat16 in the forms of this distribution and of vllm-triton."""
    return Offer(
        provider=provider,
        ops={"decode_layers": "vllm_cuda.layers:decode_layers"},
        dtypes=frozenset({"bfloat16"}),
        kv_dtypes=frozenset({"bfloat16"}),
        head_sizes=HEAD_SIZES,
        architectures=frozenset(HOPPER.architectures),
        priority=10,
        accepts=prompts.same_dtype(accepts),
        note=f"steps of one token each of up to {MOST_ROWS} rows, where weights are plain bfloat16",
    )
