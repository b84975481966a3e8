"""Attention over the paged KV: on Hopper prompts by the kernel of `extend`, the rest as `vllm_triton.ops` has it.

Which shapes the kernel takes is in `backends.prompts.attended`: those at which it was measured to be faster. Rows of one query
are computed by the kernel for them, in mixed steps too.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from vllm_cuda import extend
from vllm_cuda.backends import hopper, prompts
from vllm_cuda.extend_tiles import Form
from vllm_triton.kernels.codec import PLAIN
from vllm_triton.ops import attention as shared
from vllm_triton.ops import fresh
from vllm_triton.ops.cache import KV, qk_norm_rope_kv_write
from vllm_triton.tuning import active

_ALIGNED = 8
"""Numbers of 16 bits at whose multiples bulk tensor copies find tokens, heads and blocks."""


def paged_attention(
    out: Tensor,
    q: Tensor,
    kv: KV,
    query_start: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    window: int,
    soft_cap: float,
    sinks: Tensor | None = None,
) -> None:
    """As `vllm_triton.ops.attention.paged_attention`."""
    rows = (query_start, seq_lens, block_table)
    plain = not window and soft_cap <= 0.0 and sinks is None and scale > 0.0
    form = _form_of(out, q, kv, seq_lens.shape[0]) if plain and max_query_len > 1 else None
    if form is None:
        shared.paged_attention(out, q, kv, *rows, max_query_len, max_seq_len, scale, window, soft_cap, sinks)
        return
    extend.launch(out, q, kv, *rows, max_seq_len, scale, form, _others(form), active().multiprocessors)
    if not form.singles:
        # Told that no row has several queries, it takes those of one and passes over the others.
        shared.paged_attention(out, q, kv, *rows, 1, max_seq_len, scale, window, soft_cap)


def qk_norm_rope_attention(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    positions: Tensor,
    cos_sin: Tensor | None,
    interleaved: bool,
    kv: KV,
    slot_mapping: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    window: int,
    soft_cap: float,
    sinks: Tensor | None = None,
) -> None:
    """As `vllm_triton.ops.fresh.qk_norm_rope_attention`."""
    heads = (q, k, v, q_weight, k_weight, eps, positions, cos_sin, interleaved, kv, slot_mapping)
    rows = (query_start, seq_lens, block_table, max_query_len, max_seq_len, scale, window, soft_cap, sinks)
    if max_query_len > 1:
        qk_norm_rope_kv_write(*heads)
        paged_attention(out, q, kv, *rows)
    else:
        fresh.qk_norm_rope_attention(out, *heads, *rows)


def _form_of(out: Tensor, q: Tensor, kv: KV, num_rows: int) -> Form | None:
    """Form of the kernel for rows of several queries; None where it does not take them."""
    tokens, heads, head_size = q.shape
    on = active()
    if not tokens or on.family != hopper.TUNING.family or q.dtype not in (torch.bfloat16, torch.float16):
        return None
    if kv.kind != PLAIN.value or not out.dtype == kv.blocks.dtype == q.dtype or kv.block_stride % _ALIGNED:
        return None
    if not (_readable(q) and _readable(out) and kv.blocks.data_ptr() % (2 * _ALIGNED) == 0):
        return None
    group = heads // kv.num_heads
    tile = prompts.attended(tokens, group, kv.num_heads, head_size, on.multiprocessors)
    if tile is None or kv.tokens_per_block not in prompts.BLOCK_SIZES:
        return None
    return Form(tile, head_size, kv.num_heads, group, kv.tokens_per_block, num_rows == 1, q.dtype == torch.float16)


@lru_cache(maxsize=1024)
def _others(form: Form) -> tuple[Form, ...]:
    """What other steps of the same model take."""
    every = (replace(form, tile=tile, singles=singles) for tile in prompts.TILES[form.head_size] for singles in (False, True))
    return tuple(one for one in every if one != form)


def _readable(x: Tensor) -> bool:
    """Whether heads [T,H,D] lie where 16 bytes of them are read or written at once."""
    token, head, number = x.stride()
    return number == 1 and token % _ALIGNED == 0 and head % _ALIGNED == 0 and x.data_ptr() % (2 * _ALIGNED) == 0
