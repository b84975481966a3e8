"""Attention over the paged KV: on Hopper prompts by the kernel of `extend`, single queries by that of `decode`, the rest as
`vllm_triton.ops` has it.

Which shapes the kernels take is in `backends.prompts.attended` and `backends.decodes.form_of`: those at which they were
measured to be faster. Rows of one query are computed by the kernel for them, in mixed steps too.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from vllm_cuda import extend, singles
from vllm_cuda.backends import hopper, prompts
from vllm_cuda.decode import NewTokens
from vllm_cuda.extend_tiles import Form
from vllm_triton.kernels.codec import PLAIN
from vllm_triton.ops import attention as shared
from vllm_triton.ops import fresh
from vllm_triton.ops.cache import KV, qk_norm_rope_kv_write
from vllm_triton.tuning import active

_form = lru_cache(maxsize=1024)(Form)
"""One object a form: it is looked up in every launch."""


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
    plain = not window and soft_cap <= 0.0 and sinks is None
    if max_query_len == 1 and plain and singles.attend(out, q, kv, *rows, scale, None):
        return
    several = max_query_len > 1 and soft_cap <= 0.0 and scale > 0.0
    form = _form_of(out, q, kv, seq_lens.shape[0], max_seq_len, window, sinks) if several else None
    if form is None:
        shared.paged_attention(out, q, kv, *rows, max_query_len, max_seq_len, scale, window, soft_cap, sinks)
        return
    extend.launch(out, q, kv, *rows, max_seq_len, scale, window, sinks, form, _others(form), active().multiprocessors)
    if not form.singles and not (plain and singles.attend(out, q, kv, *rows, scale, None)):
        # Told that no row has several queries, it takes those of one and passes over the others.
        shared.paged_attention(out, q, kv, *rows, 1, max_seq_len, scale, window, soft_cap, sinks)


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
        return
    plain = not window and soft_cap <= 0.0 and sinks is None
    new = NewTokens(k, v, q_weight, k_weight, eps, positions, cos_sin, interleaved, slot_mapping)
    if not (plain and singles.attend(out, q, kv, query_start, seq_lens, block_table, scale, new)):
        fresh.qk_norm_rope_attention(out, *heads, *rows)


def _form_of(out: Tensor, q: Tensor, kv: KV, num_rows: int, max_seq_len: int, window: int, sinks: Tensor | None) -> Form | None:
    """Form of the kernel for rows of several queries; None where it does not take them."""
    tokens, heads, head_size = q.shape
    on = active()
    if not tokens or on.family != hopper.TUNING.family or q.dtype not in (torch.bfloat16, torch.float16):
        return None
    if kv.kind != PLAIN.value or not out.dtype == kv.blocks.dtype == q.dtype or kv.block_stride % singles.ALIGNED:
        return None
    if not (singles.is_readable(q) and singles.is_readable(out) and kv.blocks.data_ptr() % (2 * singles.ALIGNED) == 0):
        return None
    group = heads // kv.num_heads
    keys = min(max_seq_len, window or max_seq_len)
    tile = prompts.attended(tokens, keys, group, kv.num_heads, head_size, on.multiprocessors)
    if tile is None or kv.tokens_per_block not in prompts.BLOCK_SIZES:
        return None
    single, half = num_rows == 1, q.dtype == torch.float16
    return _form(tile, head_size, kv.num_heads, group, kv.tokens_per_block, single, half, window > 0, sinks is not None)


@lru_cache(maxsize=1024)
def _others(form: Form) -> tuple[Form, ...]:
    """What other steps of the same model take."""
    every = (replace(form, tile=tile, singles=singles) for tile in prompts.TILES[form.head_size] for singles in (False, True))
    return tuple(one for one in every if one != form)
