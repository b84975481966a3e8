"""Attention of a step whose keys and values are not in the cache yet, in one kernel where every row has one token."""

from __future__ import annotations

from torch import Tensor

from vllm_triton.kernels import fresh
from vllm_triton.kernels.codec import PLAIN
from vllm_triton.ops.attention import CROWDED_BYTES, decoding, paged_attention, queries_bytes, shape_of
from vllm_triton.ops.cache import KV, qk_norm_rope_kv_write
from vllm_triton.tuning import active

PROGRAMS = 2
"""Rows and KV heads a multiprocessor up to which the start and the end of a kernel take longer than what it has to do."""


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
    """`qk_norm_rope_kv_write`, then `paged_attention`; one kernel where `_is_small`.

    Raises UnsupportedError as `paged_attention` does.
    """
    if max_query_len > 1 or (q_weight is None) != (k_weight is None) or not _is_small(q, kv):
        qk_norm_rope_kv_write(q, k, v, q_weight, k_weight, eps, positions, cos_sin, interleaved, kv, slot_mapping)
        masks = (max_query_len, max_seq_len, scale, window, soft_cap)
        paged_attention(out, q, kv, query_start, seq_lens, block_table, *masks, sinks)
        return
    if not q.shape[0]:
        return
    grid, parts, meta = decoding(out, q, kv, seq_lens.shape[0], max_seq_len, window)
    fresh.decode_fresh[grid](
        out,
        *parts,
        q,
        k,
        v,
        q if q_weight is None else q_weight,
        q if k_weight is None else k_weight,
        eps,
        positions,
        positions if cos_sin is None else cos_sin,
        slot_mapping,
        kv.blocks,
        block_table,
        query_start,
        seq_lens,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        *out.stride()[:2],
        block_table.stride(0),
        kv.block_stride,
        scale,
        soft_cap if soft_cap > 0.0 else 1.0,
        window,
        grid[2],
        q if sinks is None else sinks,
        HALF=kv.head_size // 2 if cos_sin is None else cos_sin.shape[2],
        NORM=q_weight is not None,
        ROPE=cos_sin is not None,
        INTERLEAVED=interleaved,
        **meta,
        **shape_of(q, kv, window, soft_cap, sinks),
    )


def _is_small(q: Tensor, kv: KV) -> bool:
    """Whether one kernel takes a step of q [T,Hq,D]: of few programs, over a cache of q's dtype.

    On an H200 it made a single stream of Qwen3-8B 1.6 % faster, and 64 on two GPUs; 64 rows of eight KV heads not at all.
    """
    few = q.shape[0] * kv.num_heads <= PROGRAMS * active().multiprocessors
    return few and kv.kind == PLAIN.value and kv.blocks.dtype == q.dtype and queries_bytes(q, kv) < CROWDED_BYTES
