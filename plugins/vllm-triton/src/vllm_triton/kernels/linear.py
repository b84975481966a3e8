"""Products of few rows with a weight matrix, which read the weight once, at memory speed.

Both kernels take what lies around the product along: `x` may be normed before it, and the result may be added to a
residual, or be the gate and the up projection of a gated MLP, whose rows lie N apart.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_triton.kernels.elementwise import activate
from vllm_triton.kernels.pdl import trigger, wait

ADD = tl.constexpr(1)
GATED = tl.constexpr(2)


@triton.jit
def prefetch(address, num_bytes: tl.constexpr):
    """Bring num_bytes (a multiple of 16) behind each address to the L2 cache (PTX ISA, cp.async.bulk.prefetch)."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [address.to(tl.int64), tl.full(address.shape, num_bytes, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["eps"])
def one_row(
    out, x, weight, bias, norm, eps, N, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BIAS: tl.constexpr,
    NORM: tl.constexpr, EPILOGUE: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """out [N] = weight [N, K] @ x [K] + bias; products and sums in float32. ADD: out += that. GATED: weight is [2N, K]."""
    trigger(PDL)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_K)
    valid = rows < N
    at = weight + rows.to(tl.int64)[:, None] * K
    up_at = at + tl.full([], N, tl.int64) * K
    first = valid[:, None] & (columns < K)[None, :]
    # The weight does not depend on the kernel before: its first tile is on the way while that one ends.
    tile = tl.load(at + columns[None, :], mask=first, other=0.0, eviction_policy="evict_first")
    if EPILOGUE == GATED:
        up_tile = tl.load(up_at + columns[None, :], mask=first, other=0.0, eviction_policy="evict_first")
        up_acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    wait(PDL)
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        value = tl.load(x + start + columns, mask=start + columns < K, other=0.0).to(tl.float32)
        if NORM:
            squares += value * value
            value *= tl.load(norm + start + columns, mask=start + columns < K, other=0.0)
        acc += tile.to(tl.float32) * value[None, :]
        if EPILOGUE == GATED:
            up_acc += up_tile.to(tl.float32) * value[None, :]
        if start + BLOCK_K < K:
            after = start + BLOCK_K + columns
            inside = valid[:, None] & (after < K)[None, :]
            tile = tl.load(at + after[None, :], mask=inside, other=0.0, eviction_policy="evict_first")
            if EPILOGUE == GATED:
                up_tile = tl.load(up_at + after[None, :], mask=inside, other=0.0, eviction_policy="evict_first")
    result = tl.sum(acc, 1)
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, 0) / K + eps)
        result *= scale
    if BIAS:
        result += tl.load(bias + rows, mask=valid, other=0.0).to(tl.float32)
    if EPILOGUE == GATED:
        up = tl.sum(up_acc, 1)
        if NORM:
            up *= scale
        if BIAS:
            up += tl.load(bias + N + rows, mask=valid, other=0.0).to(tl.float32)
        result = activate(result, KIND) * up
    if EPILOGUE == ADD:
        result += tl.load(out + rows, mask=valid, other=0.0).to(tl.float32)
    tl.store(out + rows, result.to(out.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=["T"])
def few_rows(
    out, x, weight, bias, partial, locks, T, N, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, BIAS: tl.constexpr, EPILOGUE: tl.constexpr, KIND: tl.constexpr,
    AHEAD: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """out [T, N] = x [T, K] @ weight [N, K].T + bias, T <= BLOCK_M. ADD: out += that. GATED: weight is [2N, K].

    The SPLIT programs of a tile each sum a part of K, of whole BLOCK_K: the last to end adds the float32 parts in their
    order, so that results do not depend on which that is. Locks are zero before and after.
    """
    trigger(PDL)
    tile = tl.program_id(0)
    split = tl.program_id(1)
    SPAN: tl.constexpr = K // SPLIT
    rows = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    valid = rows < N
    lines = weight + (tl.where(valid, rows, 0).to(tl.int64) * K + split * SPAN)
    between = tl.full([], N, tl.int64) * K
    if PDL and AHEAD > 0:
        prefetch(lines, AHEAD)
        if EPILOGUE == GATED:
            prefetch(lines + between, AHEAD)
    token = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_K)
    source = x + (token.to(tl.int64)[:, None] * K + split * SPAN + columns[None, :])
    at = lines[:, None] + columns[None, :]
    there = (token < T)[:, None]
    wait(PDL)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, SPAN, BLOCK_K, num_stages=STAGES):
        value = tl.load(source + start, mask=there, other=0.0)
        w = tl.load(at + start, eviction_policy="evict_first")
        acc = tl.dot(value, tl.trans(w), acc)
        if EPILOGUE == GATED:
            up = tl.load(at + between + start, eviction_policy="evict_first")
            up_acc = tl.dot(value, tl.trans(up), up_acc)
    last = True
    if SPLIT > 1:
        PARTS: tl.constexpr = 2 if EPILOGUE == GATED else 1
        AREA: tl.constexpr = BLOCK_M * BLOCK_N
        place = token[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        mine = partial + ((tile * SPLIT + split) * PARTS).to(tl.int64) * AREA + place
        tl.store(mine, acc, mask=there)
        if EPILOGUE == GATED:
            tl.store(mine + AREA, up_acc, mask=there)
        tl.debug_barrier()
        arrived = tl.atomic_add(locks + tile, 1, sem="acq_rel")
        last = arrived == SPLIT - 1
        if last:
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            up_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for other in tl.static_range(SPLIT):
                theirs = partial + ((tile * SPLIT + other) * PARTS).to(tl.int64) * AREA + place
                acc += tl.load(theirs, mask=there, other=0.0, cache_modifier=".cg")
                if EPILOGUE == GATED:
                    up_acc += tl.load(theirs + AREA, mask=there, other=0.0, cache_modifier=".cg")
            tl.atomic_xchg(locks + tile, 0, sem="relaxed")
    if last:
        if BIAS:
            acc += tl.load(bias + rows, mask=valid, other=0.0).to(tl.float32)[None, :]
        if EPILOGUE == GATED:
            if BIAS:
                up_acc += tl.load(bias + N + rows, mask=valid, other=0.0).to(tl.float32)[None, :]
            acc = activate(acc, KIND) * up_acc
        target = out + (token.to(tl.int64)[:, None] * N + rows[None, :])
        inside = there & valid[None, :]
        if EPILOGUE == ADD:
            acc += tl.load(target, mask=inside, other=0.0).to(tl.float32)
        tl.store(target, acc.to(out.dtype.element_ty), mask=inside)
