"""Products with quantised weights, which are read as they are and widened in registers; and whole weights widened.

A weight is codes of one byte [N, K] (fp8 or int8, `kernels.codec`), or of four bits [N, K / 2]: of every UNIT inputs the first
half lies in the low, the second in the high four bits. Its numbers are (code - zero) * scale, with scale float32 and zero
uint8 [N, K / GROUP], or, GROUP 0, scale [N]. Each step of a product takes UNIT inputs, which share a scale: products are of
codes, and scales go to their sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_triton.kernels.codec import widened
from vllm_triton.kernels.elementwise import activate
from vllm_triton.kernels.linear import ADD, GATED
from vllm_triton.kernels.pdl import trigger, wait

INT4 = tl.constexpr(4)
"""Beside the kinds of `kernels.codec`: four bits."""


@triton.jit
def part(
    acc, weight, scale, zero, rows, valid, low, high, start, K: tl.constexpr, UNIT: tl.constexpr, GROUP: tl.constexpr,
    FORMAT: tl.constexpr, FP8: tl.constexpr
):  # fmt: skip
    """acc [BLOCK_N, BLOCK_M] plus the products of weight rows and inputs start .. start + UNIT.

    low [BLOCK_M, UNIT] are these inputs; of four-bit weights low and high are the halves of them.
    """
    line = tl.where(valid, rows, 0).to(tl.int64)
    if FORMAT == INT4:
        at = weight + line[:, None] * (K // 2) + start // 2 + tl.arange(0, UNIT // 2)[None, :]
        codes = tl.load(at, eviction_policy="evict_first")
        offset = tl.load(zero + line * (K // GROUP) + start // GROUP).to(low.dtype)[:, None]
        first = (codes & 15).to(low.dtype) - offset
        second = (codes >> 4).to(low.dtype) - offset
        product = tl.dot(first.to(low.dtype), tl.trans(low), input_precision="ieee")
        product = tl.dot(second.to(low.dtype), tl.trans(high), product, input_precision="ieee")
    else:
        columns = tl.arange(0, UNIT)
        at = weight + line[:, None] * K + start + columns[None, :]
        if K % UNIT == 0:
            codes = tl.load(at, eviction_policy="evict_first")
        else:
            codes = tl.load(at, mask=(start + columns < K)[None, :], other=0, eviction_policy="evict_first")
        codes = widened(codes, low, FORMAT, FP8)
        if GROUP == 0:
            product = tl.dot(codes, tl.trans(low), acc, input_precision="ieee")
        else:
            product = tl.dot(codes, tl.trans(low), input_precision="ieee")
    if GROUP == 0:
        return product
    else:
        GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
        return acc + product * tl.load(scale + line * GROUPS + start // GROUP)[:, None]


@triton.jit(do_not_specialize=["T"])
def few_rows(
    out, x, weight, scale, zero, bias, partial, locks, T, N, x_row, K: tl.constexpr, UNIT: tl.constexpr, GROUP: tl.constexpr,
    FORMAT: tl.constexpr, FP8: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
    BIAS: tl.constexpr, EPILOGUE: tl.constexpr, KIND: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """out [T, N] = x [T, K] @ weight [N, K].T + bias. ADD: out += that. GATED: weight is [2N, K].

    A program has BLOCK_N outputs of BLOCK_M rows, over a part of K of whole units; of SPLIT programs the last to end adds the
    parts in their order. Locks are zero before and after.
    """
    trigger(PDL)
    tile = tl.program_id(0)
    split = tl.program_id(1)
    cell = tl.program_id(2) * tl.num_programs(0) + tile
    rows = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    valid = rows < N
    token = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    there = (token < T)[:, None]
    HALF: tl.constexpr = UNIT // 2 if FORMAT == INT4 else UNIT
    UNITS: tl.constexpr = (K + UNIT - 1) // UNIT
    SPAN: tl.constexpr = (UNITS // SPLIT) * UNIT
    columns = tl.arange(0, HALF)
    source = x + (token.to(tl.int64)[:, None] * x_row + columns[None, :])
    wait(PDL)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up_acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for begin in tl.range(0, SPAN, UNIT, num_stages=STAGES):
        start = split * SPAN + begin
        if K % UNIT == 0:
            low = tl.load(source + start, mask=there, other=0.0)
        else:
            low = tl.load(source + start, mask=there & (start + columns < K)[None, :], other=0.0)
        high = low
        if FORMAT == INT4:
            high = tl.load(source + start + HALF, mask=there, other=0.0)
        acc = part(acc, weight, scale, zero, rows, valid, low, high, start, K, UNIT, GROUP, FORMAT, FP8)
        if EPILOGUE == GATED:
            up_acc = part(up_acc, weight, scale, zero, rows + N, valid, low, high, start, K, UNIT, GROUP, FORMAT, FP8)
    last = True
    if SPLIT > 1:
        PARTS: tl.constexpr = 2 if EPILOGUE == GATED else 1
        AREA: tl.constexpr = BLOCK_M * BLOCK_N
        place = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        mine = partial + ((cell * SPLIT + split) * PARTS).to(tl.int64) * AREA + place
        tl.store(mine, acc)
        if EPILOGUE == GATED:
            tl.store(mine + AREA, up_acc)
        tl.debug_barrier()
        last = tl.atomic_add(locks + cell, 1, sem="acq_rel") == SPLIT - 1
        if last:
            acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            up_acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for other in tl.static_range(SPLIT):
                theirs = partial + ((cell * SPLIT + other) * PARTS).to(tl.int64) * AREA + place
                acc += tl.load(theirs, cache_modifier=".cg")
                if EPILOGUE == GATED:
                    up_acc += tl.load(theirs + AREA, cache_modifier=".cg")
            tl.atomic_xchg(locks + cell, 0, sem="relaxed")
    if last:
        if GROUP == 0:
            acc *= tl.load(scale + rows, mask=valid, other=0.0)[:, None]
            if EPILOGUE == GATED:
                up_acc *= tl.load(scale + N + rows, mask=valid, other=0.0)[:, None]
        if BIAS:
            acc += tl.load(bias + rows, mask=valid, other=0.0).to(tl.float32)[:, None]
            if EPILOGUE == GATED:
                up_acc += tl.load(bias + N + rows, mask=valid, other=0.0).to(tl.float32)[:, None]
        if EPILOGUE == GATED:
            acc = activate(acc, KIND) * up_acc
        target = out + (token.to(tl.int64)[None, :] * N + rows[:, None])
        inside = tl.trans(there) & valid[:, None]
        if EPILOGUE == ADD:
            acc += tl.load(target, mask=inside, other=0.0).to(tl.float32)
        tl.store(target, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def widen(
    out, weight, scale, zero, N, K: tl.constexpr, UNIT: tl.constexpr, GROUP: tl.constexpr, FORMAT: tl.constexpr,
    FP8: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """out [N, K] = the weight's numbers: one program BLOCK_N rows and UNIT columns."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    valid = (rows < N)[:, None]
    start = tl.program_id(1) * UNIT
    line = tl.where(rows < N, rows, 0).to(tl.int64)
    GROUPS: tl.constexpr = 1 if GROUP == 0 else (K + GROUP - 1) // GROUP
    factor_at = line if GROUP == 0 else line * GROUPS + start // GROUP
    factor = tl.load(scale + factor_at)[:, None]
    like = tl.zeros([1], tl.float32)
    if FORMAT == INT4:
        half = tl.arange(0, UNIT // 2)[None, :]
        codes = tl.load(weight + line[:, None] * (K // 2) + start // 2 + half, mask=valid, other=0)
        offset = tl.load(zero + factor_at).to(tl.float32)[:, None]
        target = out + line[:, None] * K + start + half
        tl.store(target, (((codes & 15).to(tl.float32) - offset) * factor).to(out.dtype.element_ty), mask=valid)
        tl.store(target + UNIT // 2, (((codes >> 4).to(tl.float32) - offset) * factor).to(out.dtype.element_ty), mask=valid)
    else:
        columns = start + tl.arange(0, UNIT)[None, :]
        inside = valid & (columns < K)
        codes = tl.load(weight + line[:, None] * K + columns, mask=inside, other=0)
        number = widened(codes, like, FORMAT, FP8) * factor
        tl.store(out + line[:, None] * K + columns, number.to(out.dtype.element_ty), mask=inside)
