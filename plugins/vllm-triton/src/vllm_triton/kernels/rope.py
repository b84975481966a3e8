"""Query and key norm, rotary embedding and KV write in one pass over the heads of a token."""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_triton.kernels.pdl import trigger, wait


@triton.jit
def qk_norm_rope_kv_write(
    q,
    k,
    v,
    q_weight,
    k_weight,
    eps,
    positions,
    cos_sin,
    cache,
    slots,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    block_stride,
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
            place = (slot // TPB) * block_stride + (slot % TPB) * D
            keys = cache + place + kv_head.to(tl.int64) * TPB * D
            kind = cache.dtype.element_ty
            tl.store(keys[:, None] + low[None, :], a.to(kind), mask=pairs[None, :])
            tl.store(keys[:, None] + high[None, :], b.to(kind), mask=pairs[None, :])
            values = v + token * v_token + kv_head * v_head
            v_low = tl.load(values[:, None] + low[None, :], mask=pairs[None, :])
            v_high = tl.load(values[:, None] + high[None, :], mask=pairs[None, :])
            stored = keys + HK * TPB * D
            tl.store(stored[:, None] + low[None, :], v_low.to(kind), mask=pairs[None, :])
            tl.store(stored[:, None] + high[None, :], v_high.to(kind), mask=pairs[None, :])
            if 2 * HALF < D:
                tl.store(keys[:, None] + rest[None, :], c.to(q.dtype.element_ty).to(kind), mask=rests[None, :])
                v_rest = tl.load(values[:, None] + rest[None, :], mask=rests[None, :])
                tl.store(stored[:, None] + rest[None, :], v_rest.to(kind), mask=rests[None, :])


@triton.jit
def kv_write(
    k,
    v,
    cache,
    slots,
    k_token,
    k_head,
    v_token,
    v_head,
    block_stride,
    HK: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TPB: tl.constexpr,
):
    """One program a token and head."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    column = tl.arange(0, BLOCK_D)
    mask = column < D
    slot = tl.load(slots + token)
    keys = cache + (slot // TPB) * block_stride + (head * TPB + slot % TPB) * D + column
    kind = cache.dtype.element_ty
    tl.store(keys, tl.load(k + token * k_token + head * k_head + column, mask=mask).to(kind), mask=mask)
    tl.store(keys + HK * TPB * D, tl.load(v + token * v_token + head * v_head + column, mask=mask).to(kind), mask=mask)
