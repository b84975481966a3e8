"""Attention of a step whose keys and values are not in the cache yet, in one kernel where every row has one token."""

from __future__ import annotations

from torch import Tensor

from vllm_triton.kernels import fresh
from vllm_triton.kernels.codec import PLAIN
from vllm_triton.ops.attention import (
    CROWDED_BYTES,
    Shape,
    decoding,
    paged_attention,
    parts_of,
    queries_bytes,
    shape_of,
    spans_of,
)
from vllm_triton.ops.cache import KV, qk_norm_rope_kv_write, strides_of
from vllm_triton.ops.launch import Launch, Programs, settled
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
    shape = shape_of(out, q, kv, block_table, scale, window, soft_cap, sinks)
    half = None if cos_sin is None else cos_sin.shape[2]
    heads = (k.stride(), v.stride(), None if q_weight is None else eps, half, interleaved)
    programs, cells, launch = _decode_fresh(shape, seq_lens.shape[0], spans_of(max_seq_len), *heads)
    launch.start(
        programs,
        out,
        *parts_of(out, cells),
        q,
        k,
        v,
        q if q_weight is None else q_weight,
        q if k_weight is None else k_weight,
        positions,
        positions if cos_sin is None else cos_sin,
        slot_mapping,
        kv.blocks,
        block_table,
        query_start,
        seq_lens,
        q if sinks is None else sinks,
    )


@settled
def _decode_fresh(
    shape: Shape,
    num_rows: int,
    max_seq_len: int,
    k: tuple[int, ...],
    v: tuple[int, ...],
    eps: float | None,
    half: int | None,
    interleaved: bool,
) -> tuple[Programs, int, Launch]:
    """Of k and v with these strides: without norms where there is no eps, without rotation where there is no half."""
    programs, cells, options = decoding(shape, num_rows, max_seq_len)
    # A cache of numbers alone has neither scales nor a kind.
    fixed = {name: value for name, value in shape.settled.items() if name not in ("scale_stride", "KIND")}
    launch = Launch(
        fresh.decode_fresh,
        eps=eps or 0.0,
        HALF=shape.size // 2 if half is None else half,
        NORM=eps is not None,
        ROPE=half is not None,
        INTERLEAVED=interleaved,
        **strides_of(k=k, v=v),
        **options,
        **fixed,
    )
    return programs, cells, launch


def _is_small(q: Tensor, kv: KV) -> bool:
    """Whether one kernel takes a step of q [T,Hq,D]: of few programs, over a cache of q's dtype.

    On an H200 it made a single stream of Qwen3-8B 1.6 % faster, and 64 on two GPUs; 64 rows of eight KV heads not at all.
    """
    count, heads, size = q.shape
    few = count * kv.num_heads <= PROGRAMS * active().multiprocessors
    plain = kv.kind == PLAIN.value and kv.blocks.dtype == q.dtype
    return few and plain and queries_bytes(heads // kv.num_heads, size, q.element_size()) < CROWDED_BYTES
