"""Query and key norm, rotary embedding and KV write in one pass over the heads of a token; whole blocks copied and converted.

The cache is as in `kernels.attention`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_triton.kernels.codec import INT8, PLAIN, narrowed, scale_of, widened
from vllm_triton.kernels.pdl import trigger, wait


@triton.jit
def qk_norm_rope_kv_write(
    q,
    k,
    v,
    q_weight,
    k_weight,
    positions,
    cos_sin,
    cache,
    scales,
    slots,
    eps,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    block_stride,
    scale_stride,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    HEADS: tl.constexpr,
    TPB: tl.constexpr,
    NORM: tl.constexpr,
    ROPE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    WRITE: tl.constexpr,
    KIND: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a token and HEADS heads, those of q first; HEADS divides HQ and HK.

    A head is the pairs that rotate (HALF of them) and the rest, D - 2 HALF elements. The cache is
    [blocks, 2, HK, TPB, D], keys at 0.
    """
    trigger(PDL)
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * HEADS
    is_q = first < HQ
    pair = tl.arange(0, BLOCK_HALF)
    pairs = pair < HALF
    if INTERLEAVED:
        low, high = 2 * pair, 2 * pair + 1
    else:
        low, high = pair, pair + HALF
    rest = 2 * HALF + tl.arange(0, BLOCK_REST)
    rests = rest < D
    head = tl.arange(0, HEADS)
    if is_q:
        base = q + token * q_token + (first + head) * q_head
        weight = q_weight
    else:
        base = k + token * k_token + (first - HQ + head) * k_head
        weight = k_weight
    wait(PDL)
    a = tl.load(base[:, None] + low[None, :], mask=pairs[None, :], other=0.0).to(tl.float32)
    b = tl.load(base[:, None] + high[None, :], mask=pairs[None, :], other=0.0).to(tl.float32)
    if 2 * HALF < D:
        c = tl.load(base[:, None] + rest[None, :], mask=rests[None, :], other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(a * a, 1) + tl.sum(b * b, 1)
        if 2 * HALF < D:
            squares += tl.sum(c * c, 1)
        scale = tl.rsqrt(squares / D + eps)[:, None]
        a = scale * a * tl.load(weight + low, mask=pairs, other=0.0)[None, :]
        b = scale * b * tl.load(weight + high, mask=pairs, other=0.0)[None, :]
        if 2 * HALF < D:
            c = scale * c * tl.load(weight + rest, mask=rests, other=0.0)[None, :]
    if ROPE:
        position = tl.load(positions + token).to(tl.int64)
        cos = tl.load(cos_sin + position * 2 * HALF + pair, mask=pairs, other=0.0)[None, :]
        sin = tl.load(cos_sin + position * 2 * HALF + HALF + pair, mask=pairs, other=0.0)[None, :]
        rotated = a * cos - b * sin
        b = b * cos + a * sin
        a = rotated
    a, b = a.to(q.dtype.element_ty), b.to(q.dtype.element_ty)
    tl.store(base[:, None] + low[None, :], a, mask=pairs[None, :])
    tl.store(base[:, None] + high[None, :], b, mask=pairs[None, :])
    if 2 * HALF < D:
        tl.store(base[:, None] + rest[None, :], c.to(q.dtype.element_ty), mask=rests[None, :])
    if WRITE:
        if first >= HQ:
            kv_head = first - HQ + head
            slot = tl.load(slots + token)
            keys = cache + (slot // TPB) * block_stride + (slot % TPB) * D + kv_head.to(tl.int64) * TPB * D
            factors = scales + (slot // TPB) * scale_stride + kv_head * TPB + slot % TPB
            # What is stored is what the rounded heads are, as a write of its own would store it.
            # Names of their own: one that a branch gives another type does not compile.
            x, y = a.to(tl.float32), b.to(tl.float32)
            if 2 * HALF < D:
                z = c.to(q.dtype.element_ty).to(tl.float32)
            else:
                z = x
            put(keys, factors, low, high, rest, pairs, rests, x, y, z, D, HALF, KIND)
            values = v + token * v_token + kv_head * v_head
            x = tl.load(values[:, None] + low[None, :], mask=pairs[None, :], other=0.0).to(tl.float32)
            y = tl.load(values[:, None] + high[None, :], mask=pairs[None, :], other=0.0).to(tl.float32)
            if 2 * HALF < D:
                z = tl.load(values[:, None] + rest[None, :], mask=rests[None, :], other=0.0).to(tl.float32)
            else:
                z = x
            put(keys + HK * TPB * D, factors + HK * TPB, low, high, rest, pairs, rests, x, y, z, D, HALF, KIND)


@triton.jit
def put(
    target, factors, low, high, rest, pairs, rests, a, b, c, D: tl.constexpr, HALF: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    """Store heads of float32 parts a and b, and c where D is more than both; scales at ``factors`` where KIND has them."""
    kind = target.dtype.element_ty
    if KIND == INT8:
        largest = tl.maximum(tl.max(tl.abs(a), 1), tl.max(tl.abs(b), 1))
        if 2 * HALF < D:
            largest = tl.maximum(largest, tl.max(tl.abs(c), 1))
        factor = scale_of(largest)
        tl.store(factors, factor)
        a, b, c = a / factor[:, None], b / factor[:, None], c / factor[:, None]
    if KIND == PLAIN:
        tl.store(target[:, None] + low[None, :], a.to(kind), mask=pairs[None, :])
        tl.store(target[:, None] + high[None, :], b.to(kind), mask=pairs[None, :])
        if 2 * HALF < D:
            tl.store(target[:, None] + rest[None, :], c.to(kind), mask=rests[None, :])
    else:
        tl.store(target[:, None] + low[None, :], narrowed(a, KIND), mask=pairs[None, :])
        tl.store(target[:, None] + high[None, :], narrowed(b, KIND), mask=pairs[None, :])
        if 2 * HALF < D:
            tl.store(target[:, None] + rest[None, :], narrowed(c, KIND), mask=rests[None, :])


@triton.jit
def kv_write(
    k, v, cache, scales, slots, k_token, k_head, v_token, v_head, block_stride, scale_stride, HK: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, TPB: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    """One program a token and head."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    column = tl.arange(0, BLOCK_D)[None, :]
    mask = column < D
    slot = tl.load(slots + token)
    keys = cache + (slot // TPB) * block_stride + (head * TPB + slot % TPB) * D + column
    factors = scales + (slot // TPB) * scale_stride + head * TPB + slot % TPB + tl.arange(0, 1)
    key = tl.load(k + token * k_token + head * k_head + column, mask=mask, other=0.0)
    value = tl.load(v + token * v_token + head * v_head + column, mask=mask, other=0.0)
    store_rows(keys, factors, key, mask, KIND)
    store_rows(keys + HK * TPB * D, factors + HK * TPB, value, mask, KIND)


@triton.jit
def store_rows(target, factor_at, rows, mask, KIND: tl.constexpr):
    """Store heads [N, D] of tokens, and their scales [N] where KIND has them."""
    if KIND == PLAIN:
        tl.store(target, rows.to(target.dtype.element_ty), mask=mask)
    else:
        rows = rows.to(tl.float32)
        if KIND == INT8:
            factor = scale_of(tl.max(tl.abs(rows), 1))
            tl.store(factor_at, factor)
            rows = rows / factor[:, None]
        tl.store(target, narrowed(rows, KIND), mask=mask)


@triton.jit
def kv_copy(words, source, target, block_words, BLOCK: tl.constexpr):
    """Copy whole blocks, of ``block_words`` int32, one program a block and BLOCK words."""
    index = tl.program_id(0)
    begin = tl.load(source + index) * block_words
    end = tl.load(target + index) * block_words
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(words + end + at, tl.load(words + begin + at, mask=at < block_words, other=0), mask=at < block_words)


@triton.jit
def kv_export(
    out, cache, scales, blocks, block_stride, scale_stride, HK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    TPB: tl.constexpr, BLOCK_T: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    """float32 out [N, 2, TPB, HK, D] of cache [blocks, 2, HK, TPB, D]: one program a block, half and head."""
    index = tl.program_id(0).to(tl.int64)
    half = tl.program_id(1) % 2
    head = tl.program_id(1) // 2
    columns = tl.arange(0, BLOCK_D)
    mask = (columns < D)[None, :]
    block = tl.load(blocks + index)
    for start in range(0, TPB, BLOCK_T):
        place = start + tl.arange(0, BLOCK_T)
        line = (half * HK + head) * TPB + place
        raw = tl.load(cache + block * block_stride + line[:, None] * D + columns[None, :], mask=mask, other=0)
        tile = widened(raw, tl.zeros([1], tl.float32), KIND, False)
        if KIND == INT8:
            tile *= tl.load(scales + block * scale_stride + line)[:, None]
        target = ((index * 2 + half) * TPB + place) * HK + head
        tl.store(out + target[:, None] * D + columns[None, :], tile, mask=mask)


@triton.jit
def kv_import(
    blocks, cache, scales, target, block_stride, scale_stride, HK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    TPB: tl.constexpr, BLOCK_T: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    """The inverse of `kv_export`."""
    index = tl.program_id(0).to(tl.int64)
    half = tl.program_id(1) % 2
    head = tl.program_id(1) // 2
    columns = tl.arange(0, BLOCK_D)
    mask = (columns < D)[None, :]
    block = tl.load(target + index)
    for start in range(0, TPB, BLOCK_T):
        place = start + tl.arange(0, BLOCK_T)
        line = (half * HK + head) * TPB + place
        source = ((index * 2 + half) * TPB + place) * HK + head
        tile = tl.load(blocks + source[:, None] * D + columns[None, :], mask=mask, other=0.0)
        store_rows(
            cache + block * block_stride + line[:, None] * D + columns[None, :],
            scales + block * scale_stride + line,
            tile,
            mask,
            KIND,
        )
