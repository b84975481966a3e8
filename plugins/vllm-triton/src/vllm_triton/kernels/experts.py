"""Mixture of experts (Shazeer et al. 2017): routing, pairs of token and expert in the order of experts, products by expert.

A pair is a token and one of its K experts; pair p is of token p // K. Weights of E experts lie one below the other, as one
matrix. Nothing here asks the host: grids follow from the numbers of tokens and experts, and what is too many ends at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_triton.kernels.codec import PLAIN
from vllm_triton.kernels.elementwise import activate
from vllm_triton.kernels.linear import GATED, one_row
from vllm_triton.kernels.pdl import trigger, wait
from vllm_triton.kernels.quant import INT4, part

TOGETHER = tl.constexpr(8)
"""Tiles of rows whose programs follow each other, so that they find the rows and the weights of one another in the cache."""


@triton.jit
def route(
    experts, weights, logits, E: tl.constexpr, TOP: tl.constexpr, LANES: tl.constexpr, SLOTS: tl.constexpr,
    RENORMALIZE: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """experts, weights [T, TOP] = the largest of logits [T, E], the lower of equal ones first, and their softmax. One row each.

    NaN counts as the smallest number: what is chosen is an expert in any case.
    """
    trigger(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    lane, slot = tl.arange(0, LANES), tl.arange(0, SLOTS)
    value = tl.load(logits + row * E + lane, mask=lane < E, other=float("-inf"))
    value = tl.where(value == value, value, float("-inf"))
    largest = tl.max(value, 0)
    total = tl.sum(tl.exp(value - largest), 0)
    left = lane < E
    chosen = tl.zeros([SLOTS], tl.int32)
    score = tl.full([SLOTS], float("-inf"), tl.float32)
    for number in range(TOP):
        best = tl.max(tl.where(left, value, float("-inf")), 0)
        index = tl.min(tl.where(left & (value == best), lane, LANES), 0)
        chosen = tl.where(slot == number, index, chosen)
        score = tl.where(slot == number, best, score)
        left = left & (lane != index)
    share = tl.exp(score - largest)
    if RENORMALIZE:
        total = tl.sum(share, 0)
    tl.store(experts + row * TOP + slot, chosen, mask=slot < TOP)
    tl.store(weights + row * TOP + slot, share / total, mask=slot < TOP)


@triton.jit
def _tally(experts, begin, end, LANES: tl.constexpr, ROWS: tl.constexpr):
    """int32 [LANES]: how many of the pairs begin .. end each expert has."""
    lane = tl.arange(0, LANES)
    counts = tl.zeros([LANES], tl.int32)
    for first in range(begin, end, ROWS):
        pair = first + tl.arange(0, ROWS)
        expert = tl.load(experts + pair, mask=pair < end, other=-1)
        counts += tl.sum((expert[:, None] == lane[None, :]).to(tl.int32), 0)
    return counts


@triton.jit(do_not_specialize=["pairs"])
def count(
    counts, experts, pairs, E: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """counts [chunks, E]: pairs of each expert, a program CHUNK pairs of experts [pairs]."""
    trigger(PDL)
    wait(PDL)
    chunk = tl.program_id(0)
    lane = tl.arange(0, LANES)
    begin = chunk * CHUNK
    tl.store(counts + chunk * E + lane, _tally(experts, begin, min(begin + CHUNK, pairs), LANES, ROWS), mask=lane < E)


@triton.jit(do_not_specialize=["pairs", "chunks"])
def arrange(
    order, starts, counts, experts, pairs, chunks, E: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr, ALONE: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """order [pairs] = the pairs by their expert, those of one as they come; those of expert e begin at starts [E + 1].

    A program CHUNK pairs, after `count`; one that is ALONE counts by itself.
    """
    trigger(PDL)
    wait(PDL)
    chunk = tl.program_id(0)
    lane = tl.arange(0, LANES)
    begin = chunk * CHUNK
    end = min(begin + CHUNK, pairs)
    before = tl.zeros([LANES], tl.int32)
    if ALONE:
        total = _tally(experts, begin, end, LANES, ROWS)
    else:
        total = tl.zeros([LANES], tl.int32)
        for first in range(0, chunks, ROWS):
            other = first + tl.arange(0, ROWS)
            inside = (other < chunks)[:, None] & (lane < E)[None, :]
            theirs = tl.load(counts + other[:, None] * E + lane[None, :], mask=inside, other=0)
            total += tl.sum(theirs, 0)
            before += tl.sum(tl.where((other < chunk)[:, None], theirs, 0), 0)
    base = tl.cumsum(total, 0) - total
    if chunk == 0:
        tl.store(starts + lane, base, mask=lane < E)
        tl.store(starts + E, pairs)
    base += before
    for first in range(begin, end, ROWS):
        pair = first + tl.arange(0, ROWS)
        expert = tl.load(experts + pair, mask=pair < end, other=-1)
        mine = (expert[:, None] == lane[None, :]).to(tl.int32)
        place = tl.sum(mine * (base[None, :] + tl.cumsum(mine, 0) - mine), 1)
        tl.store(order + place, pair, mask=pair < end)
        base += tl.sum(mine, 0)


@triton.jit(do_not_specialize=["tiles"])
def grouped(
    out, x, order, starts, weight, scale, zero, tiles, N, x_row, E: tl.constexpr, TOP: tl.constexpr, LANES: tl.constexpr,
    K: tl.constexpr, UNIT: tl.constexpr, GROUP: tl.constexpr, FORMAT: tl.constexpr, FP8: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, GATHER: tl.constexpr, KIND: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Pairs in their order times their expert's matrix; weight, scale and zero as `kernels.quant` says, or numbers (PLAIN).

    GATHER: out [pairs, N] in order = f(gate) * up with [gate, up] = x[token] @ weight [E 2N, K].T, a token's row of x.
    Else: out [pairs, N] by pair = x [pairs, K] in order @ weight [E N, K].T.
    A tile is BLOCK_M pairs of one expert; there are ``tiles`` of them at most, those that are too many end at once.
    """
    trigger(PDL)
    columns = (N + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    width = TOGETHER * columns
    first_tile = program // width * TOGETHER
    beside = min(tiles - first_tile, TOGETHER)
    tile = first_tile + program % width % beside
    rows = program % width // beside * BLOCK_N + tl.arange(0, BLOCK_N)
    valid = rows < N
    lane = tl.arange(0, LANES)
    wait(PDL)
    start = tl.load(starts + lane, mask=lane < E, other=0)
    end = tl.load(starts + lane + 1, mask=lane < E, other=0)
    taken = (end - start + BLOCK_M - 1) // BLOCK_M
    until = tl.cumsum(taken, 0)
    expert = tl.sum((until <= tile).to(tl.int32), 0)
    if expert >= E:
        return
    mine = lane == expert
    place = tl.sum(tl.where(mine, start + (tile - until + taken) * BLOCK_M, 0), 0) + tl.arange(0, BLOCK_M)
    inside = place < tl.sum(tl.where(mine, end, 0), 0)
    pair = tl.load(order + place, mask=inside, other=0)
    there = inside[:, None]
    HALF: tl.constexpr = UNIT // 2 if FORMAT == INT4 else UNIT
    if GATHER:
        line = (pair // TOP).to(tl.int64)
        top = rows + expert * 2 * N
    else:
        line = tl.where(inside, place, 0).to(tl.int64)
        top = rows + expert * N
    within = tl.arange(0, HALF)
    source = x + line[:, None] * x_row + within[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up_acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for begin in tl.range(0, K, UNIT, num_stages=STAGES):
        if K % UNIT == 0:
            low = tl.load(source + begin, mask=there, other=0.0)
        else:
            low = tl.load(source + begin, mask=there & (begin + within < K)[None, :], other=0.0)
        high = low
        if FORMAT == INT4:
            high = tl.load(source + begin + HALF, mask=there, other=0.0)
        acc = part(acc, weight, scale, zero, top, valid, low, high, begin, K, UNIT, GROUP, FORMAT, FP8)
        if GATHER:
            up_acc = part(up_acc, weight, scale, zero, top + N, valid, low, high, begin, K, UNIT, GROUP, FORMAT, FP8)
    if GROUP == 0 and FORMAT != PLAIN:
        acc *= tl.load(scale + top, mask=valid, other=0.0)[:, None]
        if GATHER:
            up_acc *= tl.load(scale + N + top, mask=valid, other=0.0)[:, None]
    if GATHER:
        acc = activate(acc, KIND) * up_acc
        target = place
    else:
        target = pair
    where = out + target.to(tl.int64)[None, :] * N + rows[:, None]
    tl.store(where, acc.to(out.dtype.element_ty), mask=inside[None, :] & valid[:, None])


@triton.jit
def combine(
    out, parts, weights, SIZE: tl.constexpr, TOP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """out [T, SIZE] = the sum of parts [T TOP, SIZE] times weights [T TOP], over a token's pairs one after the other."""
    trigger(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    total = tl.zeros([BLOCK], tl.float32)
    for number in range(TOP):
        pair = row * TOP + number
        total += tl.load(weights + pair) * tl.load(parts + pair * SIZE + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + columns, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def one_pair(
    out, x, experts, weight, N, x_row, K: tl.constexpr, TOP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    KIND: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """out [pairs, N] = f(gate) * up, with [gate, up] = x[token] @ weight [E 2N, K].T of the pair's expert (`one_row`)."""
    trigger(PDL)
    pair = tl.program_id(1).to(tl.int64)
    wait(PDL)
    expert = tl.load(experts + pair).to(tl.int64)
    source = x + pair // TOP * x_row
    matrix = weight + expert * 2 * N * K
    one_row(out + pair * N, source, matrix, out, source, 0.0, N, K, BLOCK_N, BLOCK_K, False, False, GATED, KIND, False)


@triton.jit
def one_token(
    out, x, experts, weights, weight, N, K: tl.constexpr, TOP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr
):  # fmt: skip
    """out [T, N] = the sum over a token's pairs of weights [T TOP] times x [T TOP, K] @ weight [E N, K].T, its expert's."""
    trigger(PDL)
    token = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_K)
    valid = rows < N
    wait(PDL)
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for number in tl.static_range(TOP):
        pair = token * TOP + number
        share = tl.load(weights + pair)
        lines = weight + (tl.load(experts + pair).to(tl.int64) * N + rows[:, None]) * K
        for begin in tl.static_range(0, K, BLOCK_K):
            at = begin + columns
            tile = tl.load(
                lines + at[None, :], mask=valid[:, None] & (at < K)[None, :], other=0.0, eviction_policy="evict_first"
            )
            value = tl.load(x + pair * K + at, mask=at < K, other=0.0).to(tl.float32) * share
            acc += tile.to(tl.float32) * value[None, :]
    tl.store(out + token * N + rows, tl.sum(acc, 1).to(out.dtype.element_ty), mask=valid)
