"""Decoding attention of tokens whose keys and values are not in the cache yet: norms, rotation and their write come along.

One kernel stands for `kernels.rope` and `kernels.attention.decode`, which a small step would spend much of its time between.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_triton.kernels.attention import capped, decode_span, leave
from vllm_triton.kernels.pdl import trigger, wait


@triton.jit
def both(heads, there, BLOCK_D: tl.constexpr, HALF: tl.constexpr, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr):
    """float32 heads [M, D] at addresses ``heads`` [M], and what each element rotates with."""
    columns = tl.arange(0, BLOCK_D)
    x = tl.load(heads[:, None] + columns[None, :], mask=there, other=0.0).to(tl.float32)
    y = x
    if ROPE:
        other, _, _ = partner(columns, HALF, INTERLEAVED)
        turns = columns < 2 * HALF
        y = tl.load(heads[:, None] + other[None, :], mask=there & turns[None, :], other=0.0).to(tl.float32)
    return x, y


@triton.jit
def turned(
    x, y, weight, other_weight, eps, cos, sin, D: tl.constexpr, BLOCK_D: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr,
    ROPE: tl.constexpr, INTERLEAVED: tl.constexpr
):  # fmt: skip
    """Heads x [M, D], normed and rotated with y as `kernels.rope` does it; ``other_weight`` is the norm's for y."""
    if NORM:
        factor = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x = factor * x * weight[None, :]
    if ROPE:
        if NORM:
            y = factor * y * other_weight[None, :]
        _, _, is_low = partner(tl.arange(0, BLOCK_D), HALF, INTERLEAVED)
        x = x * cos[None, :] + tl.where(is_low[None, :], -y, y) * sin[None, :]
    return x


@triton.jit
def partner(columns, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Of elements of a head: with which each one rotates, as which pair, and whether it is the first of the two."""
    if INTERLEAVED:
        return columns ^ 1, columns // 2, columns % 2 == 0
    else:
        is_low = columns < HALF
        return tl.where(is_low, columns + HALF, columns - HALF), tl.where(is_low, columns, columns - HALF), is_low


@triton.jit(do_not_specialize=["splits", "window", "table_stride"])
def decode_fresh(
    out, partial, sums, locks, q, k, v, q_weight, k_weight, positions, cos_sin, slots, cache, block_table, query_start,
    seq_lens, sinks, eps, q_token, q_head, k_token, k_head, v_token, v_head, out_token, out_head, table_stride, block_stride,
    scale, soft_cap, window, splits, HK: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, TPB: tl.constexpr, BLOCK_N: tl.constexpr, CAP: tl.constexpr, WINDOW: tl.constexpr,
    SINKS: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr,
    SPLIT: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """`kernels.attention.decode` of a token whose key and value are not written yet, of a cache in its dtype.

    q, k and v are as the products left them: norms (NORM) and rotation (ROPE) are those of `kernels.rope`, and leave q and k as
    they are. The program of the last span stores the key and the value at slots [T], and attends to them as it has them.
    """
    trigger(PDL)
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    member = tl.arange(0, GP)
    columns = tl.arange(0, BLOCK_D)
    is_column = columns < D
    q_norm, q_other, k_norm, k_other = 1.0, 1.0, 1.0, 1.0
    if NORM:
        other = columns
        if ROPE:
            other, _, _ = partner(columns, HALF, INTERLEAVED)
        turns = other.to(tl.uint32) < D
        q_norm = tl.load(q_weight + columns, mask=is_column, other=0.0)
        k_norm = tl.load(k_weight + columns, mask=is_column, other=0.0)
        q_other = tl.load(q_weight + other, mask=turns, other=0.0)
        k_other = tl.load(k_weight + other, mask=turns, other=0.0)
    wait(PDL)
    begin = tl.load(query_start + row)
    if tl.load(query_start + row + 1) - begin != 1:
        return
    length = tl.load(seq_lens + row)
    oldest = 0
    if WINDOW:
        oldest = tl.maximum(length - window, 0) // BLOCK_N * BLOCK_N
    span = ((length - oldest + splits - 1) // splits + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    low = oldest + split * span
    if low >= length:
        return
    written = length - 1
    is_last = low + span > written
    token = begin.to(tl.int64)
    there = (member < G)[:, None] & is_column[None, :]
    mine = (columns < tl.where(is_last, D, 0))[None, :]
    heads = q + token * q_token + (kv_head * G + member) * q_head
    key_head = k + token * k_token + kv_head * k_head + tl.arange(0, 1)
    cos, sin = 1.0, 0.0
    if ROPE:
        _, pair, _ = partner(columns, HALF, INTERLEAVED)
        turns = columns < 2 * HALF
        table = cos_sin + tl.load(positions + token).to(tl.int64) * (2 * HALF)
        cos = tl.load(table + pair, mask=turns, other=1.0)
        sin = tl.load(table + HALF + pair, mask=turns, other=0.0)
    x, y = both(heads, there, BLOCK_D, HALF, ROPE, INTERLEAVED)
    # Those of the key and the value are on their way while the others are multiplied.
    key_x, key_y = both(key_head, mine, BLOCK_D, HALF, ROPE, INTERLEAVED)
    value = tl.load(v + token * v_token + kv_head * v_head + columns[None, :], mask=mine, other=0.0)
    slot = tl.load(slots + token)
    query = turned(x, y, q_norm, q_other, eps, cos, sin, D, BLOCK_D, HALF, NORM, ROPE, INTERLEAVED).to(q.dtype.element_ty)
    total = tl.zeros([GP], tl.float32)
    largest = tl.full([GP], float("-inf"), tl.float32)
    acc = tl.zeros([GP, BLOCK_D], tl.float32)
    total, largest, acc = decode_span(
        query, total, largest, acc, cache, cache, block_table, row, table_stride, block_stride, 0, kv_head, low,
        tl.minimum(low + span, written), length, written, scale, soft_cap, window, GP, HK, D, BLOCK_D, TPB, BLOCK_N, CAP,
        WINDOW, 0, False, STAGES
    )  # fmt: skip
    if is_last:
        key = turned(key_x, key_y, k_norm, k_other, eps, cos, sin, D, BLOCK_D, HALF, NORM, ROPE, INTERLEAVED)
        key = key.to(q.dtype.element_ty)
        target = cache + (slot // TPB) * block_stride + (kv_head * TPB + slot % TPB) * D + columns[None, :]
        tl.store(target, key, mask=mine)
        tl.store(target + HK * TPB * D, value, mask=mine)
        score = capped(tl.sum(query.to(tl.float32) * key.to(tl.float32), 1), scale, soft_cap, CAP)
        highest = tl.maximum(largest, score)
        shrink, weight = tl.exp2(largest - highest), tl.exp2(score - highest)
        total = total * shrink + weight
        acc = acc * shrink[:, None] + weight[:, None] * value.to(tl.float32)
        largest = highest
    used = (length - oldest + span - 1) // span
    leave(
        out, partial, sums, locks, total, largest, acc, row, token, kv_head, split, used, splits, out_token, out_head, sinks,
        HK, G, GP, D, BLOCK_D, SPLIT, SINKS
    )  # fmt: skip
