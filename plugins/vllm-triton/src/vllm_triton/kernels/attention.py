"""Paged attention with online softmax (Milakov and Gimelshein 2018; Dao et al. 2022), query heads of one KV head packed.

Two kernels serve a mixed batch: `extend` takes rows of several queries, tile by tile; `decode` takes rows of one query and
splits their keys over programs (Dao et al. 2023, "Flash-Decoding"). Each skips the rows of the other, so no host needs to
know which is which.

The cache of a layer is [blocks, 2, HK, TPB, D]: the tokens of one head in a block lie together, keys at 0. KIND says what its
elements are (`kernels.codec`); those of int8 have scales [blocks, 2, HK, TPB], which go to the scores and to the weights, so
that products are taken of the codes themselves. Scores are kept in units of log2, so that exp2 serves. SINKS: float32 sinks
[HK * G] are logits without a value, which join a query's sum of weights once, when it is whole.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_triton.kernels.codec import INT8, widened
from vllm_triton.kernels.pdl import trigger, wait

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def within(index, count):
    """Whether 0 <= index < count, as one comparison: waves of 64 hold each in two scalar registers, of which there are few."""
    return index.to(tl.uint32) < count.to(tl.uint32)


@triton.jit
def capped(product, scale, soft_cap, CAP: tl.constexpr):
    """Scaled and capped products, in log2 units."""
    if CAP:
        x = product * (scale / soft_cap)
        return soft_cap * (2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0) * LOG2E
    else:
        return product * (scale * LOG2E)


@triton.jit
def scores(
    q, k, k_scale, position, keys, scale, soft_cap, window, CAP: tl.constexpr, WINDOW: tl.constexpr, MASK: tl.constexpr,
    KIND: tl.constexpr
):  # fmt: skip
    """Scaled, capped and masked products of a tile [M, D] and keys [N, D], in log2 units."""
    product = tl.dot(q, tl.trans(k), input_precision="ieee")
    if KIND == INT8:
        product *= k_scale[None, :]
    product = capped(product, scale, soft_cap, CAP)
    if MASK:
        if WINDOW:
            seen = within(position[:, None] - keys[None, :], window)
        else:
            seen = keys[None, :] <= position[:, None]
        product = tl.where(seen, product, float("-inf"))
    return product


@triton.jit
def absorb(product, v, v_scale, total, largest, acc, KIND: tl.constexpr):
    """One step of the online softmax over scores [M, N] and values [N, D]."""
    highest = tl.maximum(largest, tl.max(product, 1))
    # A tile in which a query sees nothing leaves -inf, and -inf - -inf is no number.
    safe = tl.where(highest == float("-inf"), 0.0, highest)
    shrink = tl.exp2(largest - safe)
    weights = tl.exp2(product - safe[:, None])
    total = total * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None]
    if KIND == INT8:
        weights *= v_scale[None, :]
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    return total, highest, acc


@triton.jit
def joined(total, largest, sinks, head, there, SINKS: tl.constexpr):
    """Sums of whole queries, relative to their largest scores in log2 units, with the sinks of their heads."""
    if SINKS:
        sink = tl.load(sinks + head, mask=there, other=float("-inf"))
        # Above what exp2 holds it is infinite: such a sink leaves nothing of the values.
        total += tl.exp2(sink * LOG2E - largest)
    return total


@triton.jit
def blocks_of(block_table, row, table_stride, start, length, TPB: tl.constexpr, BLOCK_N: tl.constexpr):
    """Blocks of tokens start .. start + BLOCK_N of a row of ``length``: one where a tile is within a block, else one a token.

    A loop asks for those of its next tile while it computes: where keys are is then known when they are asked for. A tile may
    reach past the row's table, for the last row past all of it.
    """
    if BLOCK_N <= TPB:
        return tl.load(block_table + row * table_stride + start // TPB, mask=start < length, other=0)
    else:
        keys = start + tl.arange(0, BLOCK_N)
        return tl.load(block_table + row * table_stride + keys // TPB, mask=keys < length, other=0)


@triton.jit
def tile_of(
    blocks, block_stride, start, kv_head, D: tl.constexpr, BLOCK_D: tl.constexpr, TPB: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Offsets of the keys of tokens start .. start + BLOCK_N, in ``blocks``; the values lie HK * TPB * D further."""
    columns = tl.arange(0, BLOCK_D)
    if BLOCK_N <= TPB:
        base = blocks.to(tl.int64) * block_stride + (kv_head * TPB + start % TPB) * D
        return base + (tl.arange(0, BLOCK_N)[:, None] * D + columns[None, :])
    else:
        keys = start + tl.arange(0, BLOCK_N)
        places = blocks.to(tl.int64) * block_stride + (kv_head * TPB + keys % TPB) * D
        return places[:, None] + columns[None, :]


@triton.jit
def scales_of(scales, block_table, row, table_stride, scale_stride, keys, there, kv_head, HK: tl.constexpr, TPB: tl.constexpr):
    """float32 scales [N] of keys and of values of tokens ``keys``, 0 but where they are ``there``."""
    blocks = tl.load(block_table + row * table_stride + keys // TPB, mask=there, other=0).to(tl.int64)
    at = scales + blocks * scale_stride + kv_head * TPB + keys % TPB
    return tl.load(at, mask=there, other=0.0), tl.load(at + HK * TPB, mask=there, other=0.0)


@triton.jit
def extend_span(
    q, total, largest, acc, cache, scales, block_table, row, table_stride, block_stride, scale_stride, kv_head, position, low,
    high, oldest, length, scale, soft_cap, window, HK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, TPB: tl.constexpr,
    BLOCK_N: tl.constexpr, CAP: tl.constexpr, WINDOW: tl.constexpr, MASK: tl.constexpr, KIND: tl.constexpr,
    FP8: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """Attend to keys low .. high, both multiples of BLOCK_N; ``oldest`` is the first query's position."""
    blocks = blocks_of(block_table, row, table_stride, low, tl.minimum(high, length), TPB, BLOCK_N)
    for start in tl.range(low, high, BLOCK_N, num_stages=STAGES):
        keys = start + tl.arange(0, BLOCK_N)
        there = keys < length
        if WINDOW:
            there &= keys > oldest - window
        at = tile_of(blocks, block_stride, start, kv_head, D, BLOCK_D, TPB, BLOCK_N)
        blocks = blocks_of(block_table, row, table_stride, start + BLOCK_N, tl.minimum(high, length), TPB, BLOCK_N)
        if MASK or BLOCK_D != D:
            # A tile may reach past the sequence, or before the window: to slots that hold anything, NaN too.
            inside = there[:, None] & (tl.arange(0, BLOCK_D) < D)[None, :]
            k = tl.load(cache + at, mask=inside, other=0)
            v = tl.load(cache + at + HK * TPB * D, mask=inside, other=0)
        else:
            k = tl.load(cache + at)
            v = tl.load(cache + at + HK * TPB * D)
        k_scale, v_scale = 1.0, 1.0
        if KIND == INT8:
            k_scale, v_scale = scales_of(
                scales, block_table, row, table_stride, scale_stride, keys, there, kv_head, HK, TPB
            )  # fmt: skip
        k, v = widened(k, q, KIND, FP8), widened(v, q, KIND, FP8)
        product = scores(q, k, k_scale, position, keys, scale, soft_cap, window, CAP, WINDOW, MASK, KIND)
        total, largest, acc = absorb(product, v, v_scale, total, largest, acc, KIND)
    return total, largest, acc


@triton.jit(do_not_specialize=["num_rows", "num_tiles", "window", "table_stride"])
def extend(
    out, q, cache, scales, block_table, query_start, seq_lens, sinks, num_rows, num_tiles, q_token, q_head, out_token, out_head,
    table_stride, block_stride, scale_stride, scale, soft_cap, window, HK: tl.constexpr, G: tl.constexpr,
    GP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, TPB: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAP: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, KIND: tl.constexpr, FP8: tl.constexpr,
    SINGLES: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """A tile of BLOCK_M // GP queries of one row, all G heads of one KV head; GP is G's next power of two.

    Row s has tiles from query_start[s] // BLOCK_Q + s on, one more than it may need: found by bisection, the tiles with the
    most keys first. SINGLES: rows of one query are computed too, else left to `decode`.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // GP
    tile = num_tiles - 1 - tl.program_id(1)
    kv_head = tl.program_id(0)
    low, high = 0, num_rows
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_start + middle) // BLOCK_Q + middle <= tile:
            low = middle + 1
        else:
            high = middle
    row = low - 1
    begin = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - begin
    first = (tile - (begin // BLOCK_Q + row)) * BLOCK_Q
    if first >= count:
        return
    if not SINGLES:
        if count == 1:
            return
    length = tl.load(seq_lens + row)
    lanes = tl.arange(0, BLOCK_M)
    local = first + lanes // GP
    member = lanes % GP
    valid = (local < count) & (member < G)
    position = tl.minimum(length - count + local, length - 1)
    columns = tl.arange(0, BLOCK_D)
    inside = valid[:, None] & (columns < D)[None, :]
    head = kv_head * G + member
    token = (begin + local).to(tl.int64)
    query = tl.load(q + token[:, None] * q_token + head[:, None] * q_head + columns[None, :], mask=inside, other=0.0)
    total = tl.zeros([BLOCK_M], tl.float32)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    oldest = length - count + first
    newest = tl.minimum(oldest + BLOCK_Q, length)
    begin_keys = 0
    full_from = 0
    if WINDOW:
        begin_keys = tl.maximum(oldest - window + 1, 0) // BLOCK_N * BLOCK_N
        full_from = tl.maximum(newest - window, 0)
        full_from = (full_from + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    full_to = (oldest + 1) // BLOCK_N * BLOCK_N
    end_keys = (newest + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    if WINDOW:
        full_from = tl.minimum(full_from, end_keys)
        full_to = tl.maximum(full_to, full_from)
        total, largest, acc = extend_span(
            query, total, largest, acc, cache, scales, block_table, row, table_stride, block_stride, scale_stride, kv_head,
            position, begin_keys, full_from, oldest, length, scale, soft_cap, window, HK, D, BLOCK_D, TPB, BLOCK_N, CAP, WINDOW,
            True, KIND, FP8, STAGES
        )  # fmt: skip
    total, largest, acc = extend_span(
        query, total, largest, acc, cache, scales, block_table, row, table_stride, block_stride, scale_stride, kv_head,
        position, full_from, full_to, oldest, length, scale, soft_cap, window, HK, D, BLOCK_D, TPB, BLOCK_N, CAP, WINDOW, False,
        KIND, FP8, STAGES
    )  # fmt: skip
    total, largest, acc = extend_span(
        query, total, largest, acc, cache, scales, block_table, row, table_stride, block_stride, scale_stride, kv_head,
        position, full_to, end_keys, oldest, length, scale, soft_cap, window, HK, D, BLOCK_D, TPB, BLOCK_N, CAP, WINDOW, True,
        KIND, FP8, STAGES
    )  # fmt: skip
    result = acc / joined(total, largest, sinks, head, valid, SINKS)[:, None]
    target = out + token[:, None] * out_token + head[:, None] * out_head + columns[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def merge(
    target, partial, sums, base, used, splits, out_head, sinks, G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    MEMBERS: tl.constexpr, SPANS: tl.constexpr, SINKS: tl.constexpr
):  # fmt: skip
    """Write the spans of a row and KV head as one: their means weighted by their sums, of MEMBERS heads SPANS at a time.

    ``sinks`` are those of the KV head's first query head on.
    """
    columns = tl.arange(0, BLOCK_D)
    for first in tl.static_range(0, G, MEMBERS):
        member = first + tl.arange(0, MEMBERS)
        largest = tl.full([MEMBERS], float("-inf"), tl.float32)
        total = tl.zeros([MEMBERS], tl.float32)
        acc = tl.zeros([MEMBERS, BLOCK_D], tl.float32)
        for start in range(0, used, SPANS):
            span = start + tl.arange(0, SPANS)
            # Heads beyond the last one repeat it, so that all have sums.
            at = base + tl.minimum(member, G - 1)[:, None] * splits + span[None, :]
            there = span < used
            logs = tl.load(sums + at, mask=there[None, :], other=float("-inf"), cache_modifier=".cg")
            parts = tl.load(
                partial + at[:, :, None] * D + columns[None, None, :],
                mask=there[None, :, None] & (columns < D)[None, None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            highest = tl.maximum(largest, tl.max(logs, 1))
            shrink = tl.exp2(largest - highest)
            weight = tl.exp2(logs - highest[:, None])
            acc = acc * shrink[:, None] + tl.sum(parts * weight[:, :, None], 1)
            total = total * shrink + tl.sum(weight, 1)
            largest = highest
        inside = (member < G)[:, None] & (columns < D)[None, :]
        result = acc / joined(total, largest, sinks, member, member < G, SINKS)[:, None]
        tl.store(target + member[:, None] * out_head + columns[None, :], result.to(target.dtype.element_ty), mask=inside)


@triton.jit
def decode_span(
    query, total, largest, acc, cache, scales, block_table, row, table_stride, block_stride, scale_stride, kv_head, low, high,
    length, written, scale, soft_cap, window, GP: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    TPB: tl.constexpr, BLOCK_N: tl.constexpr, CAP: tl.constexpr, WINDOW: tl.constexpr, KIND: tl.constexpr, FP8: tl.constexpr,
    STAGES: tl.constexpr
):  # fmt: skip
    """Attend to keys low .. high of the first ``written`` of a sequence of ``length``, for the queries of its last token."""
    columns = tl.arange(0, BLOCK_D)
    position = tl.zeros([GP], tl.int32) + (written - 1)
    reach = window - (length - written)
    blocks = blocks_of(block_table, row, table_stride, low, high, TPB, BLOCK_N)
    for start in tl.range(low, high, BLOCK_N, num_stages=STAGES):
        keys = start + tl.arange(0, BLOCK_N)
        at = tile_of(blocks, block_stride, start, kv_head, D, BLOCK_D, TPB, BLOCK_N)
        blocks = blocks_of(block_table, row, table_stride, start + BLOCK_N, high, TPB, BLOCK_N)
        if WINDOW:
            seen = within(keys - (length - window), reach)
        else:
            seen = keys < written
        there = seen[:, None] & (columns < D)[None, :]
        k_scale, v_scale = 1.0, 1.0
        if KIND == INT8:
            k_scale, v_scale = scales_of(
                scales, block_table, row, table_stride, scale_stride, keys, seen, kv_head, HK, TPB
            )  # fmt: skip
        k = widened(tl.load(cache + at, mask=there, other=0), query, KIND, FP8)
        v = widened(tl.load(cache + at + HK * TPB * D, mask=there, other=0), query, KIND, FP8)
        product = scores(query, k, k_scale, position, keys, scale, soft_cap, reach, CAP, WINDOW, True, KIND)
        total, largest, acc = absorb(product, v, v_scale, total, largest, acc, KIND)
    return total, largest, acc


@triton.jit
def leave(
    out, partial, sums, locks, total, largest, acc, row, token, kv_head, split, used, splits, out_token, out_head, sinks,
    HK: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, SPLIT: tl.constexpr,
    SINKS: tl.constexpr
):  # fmt: skip
    """Write what a span found; of `used` spans of a row and KV head the last to end puts all together, in their order."""
    member = tl.arange(0, GP)
    columns = tl.arange(0, BLOCK_D)
    inside = (member < G)[:, None] & (columns < D)[None, :]
    result = acc / total[:, None]
    whole = True
    if SPLIT:
        if used > 1:
            whole = False
            base = ((row * HK + kv_head) * G * splits).to(tl.int64)
            mine = base + member * splits + split
            tl.store(partial + mine[:, None] * D + columns[None, :], result, mask=inside)
            tl.store(sums + mine, largest + tl.log2(total), mask=member < G)
            tl.debug_barrier()
            if tl.atomic_add(locks + row * HK + kv_head, 1, sem="acq_rel") == used - 1:
                first = out + token * out_token + kv_head * G * out_head
                own = sinks + kv_head * G
                merge(first, partial, sums, base, used, splits, out_head, own, G, D, BLOCK_D, 4 if G > 2 else G, 8, SINKS)
                tl.atomic_xchg(locks + row * HK + kv_head, 0, sem="relaxed")
    if whole:
        head = kv_head * G + member
        if SINKS:
            result *= (total / joined(total, largest, sinks, head, member < G, SINKS))[:, None]
        target = out + token * out_token + head[:, None] * out_head + columns[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["splits", "window", "table_stride"])
def decode(
    out, partial, sums, locks, q, cache, scales, block_table, query_start, seq_lens, sinks, q_token, q_head, out_token,
    out_head, table_stride, block_stride, scale_stride, scale, soft_cap, window, splits, HK: tl.constexpr, G: tl.constexpr,
    GP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, TPB: tl.constexpr, BLOCK_N: tl.constexpr, CAP: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr, KIND: tl.constexpr, FP8: tl.constexpr, SPLIT: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One row's query and the G heads of a KV head, over one of at most `splits` spans; GP >= 16 pads G for the dot.

    With SPLIT each program leaves float32 partial [row, head, split, D] and sums [row, head, split], the log2 of its
    span's sum; the last one of a row and KV head to end puts them together. Locks are zero before and after.
    """
    trigger(PDL)
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
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
    member = tl.arange(0, GP)
    columns = tl.arange(0, BLOCK_D)
    inside = (member < G)[:, None] & (columns < D)[None, :]
    head = kv_head * G + member
    token = begin.to(tl.int64)
    query = tl.load(q + token * q_token + head[:, None] * q_head + columns[None, :], mask=inside, other=0.0)
    total = tl.zeros([GP], tl.float32)
    largest = tl.full([GP], float("-inf"), tl.float32)
    acc = tl.zeros([GP, BLOCK_D], tl.float32)
    total, largest, acc = decode_span(
        query, total, largest, acc, cache, scales, block_table, row, table_stride, block_stride, scale_stride, kv_head, low,
        tl.minimum(low + span, length), length, length, scale, soft_cap, window, GP, HK, D, BLOCK_D, TPB, BLOCK_N, CAP, WINDOW,
        KIND, FP8, STAGES
    )  # fmt: skip
    used = (length - oldest + span - 1) // span
    leave(
        out, partial, sums, locks, total, largest, acc, row, token, kv_head, split, used, splits, out_token, out_head, sinks,
        HK, G, GP, D, BLOCK_D, SPLIT, SINKS
    )  # fmt: skip
