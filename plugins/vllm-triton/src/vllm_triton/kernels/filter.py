"""top_k, top_p and min_p without a sort, for the rows that ask for them; exact, ties included.

`tally` counts and weighs, per chunk of the vocabulary, the tokens above each of a few distances below the row's largest.
`gather` lists, in index order, the tokens above the shortest distance that is sure to hold all that is kept: a few hundred
of a language model's distribution. `settle` finds the thresholds among them by a search over the bits of a float32, several
bits a pass, and draws among what is left. A row whose list would be longer than CAPACITY is read from its logits instead.

A token is kept by top_k where fewer than k tokens lie above it, and by top_p where those above it weigh less than p of all
that top_k left: both fall with the token's value, so each has a smallest kept value, and equal ones stay.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_triton.kernels.pdl import trigger, wait
from vllm_triton.kernels.sample import NONE, SEED_HIGH, SEED_LOW, TEMPERATURE, WORDS, filters, number, uniform, weights

CUTS = tl.constexpr(8)
"""Distances below the largest, of scaled logits: a quarter of (j + 1) (j + 2), the last without end."""

COUNT_AT = tl.constexpr(44)
"""The bit from which on a cell holds its count; below lies the sum of weights, in units of WEIGHT_UNIT."""

ONE_TOKEN = tl.constexpr(1 << 44)
WEIGHT_MASK = tl.constexpr((1 << 44) - 1)
WEIGHT_UNIT = tl.constexpr(2.0**-30)
WAYS = tl.constexpr(8)
"""Parts that a pass cuts the interval of a threshold into."""


@triton.jit
def distance(cut):
    """How far below the largest a cut lies."""
    near = 0.25 * ((cut + 1) * (cut + 2)).to(tl.float32)
    return tl.where(cut == CUTS - 1, float("inf"), near)


@triton.jit
def tally(sums, cells, logits, highest, records, slots, V, chunks, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """The sum of a chunk's weights, and a cell for each cut, int64 [row, chunk, CUTS]: count and weight above it.

    Rows that do not filter keep the sums of `kernels.sample.measure`.
    """
    trigger(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    record = records + tl.load(slots + row) * WORDS
    temperature = number(record, TEMPERATURE)
    best = tl.load(highest + row)
    _top_k, _top_p, _min_p, filtered = filters(record, V)
    if (temperature <= 0.0) | (filtered == 0) | (best == float("inf")) | (best == float("-inf")):
        return
    column = chunk * BLOCK + tl.arange(0, BLOCK)
    scaled, weight = weights(logits, row, column, V, best, temperature)
    tl.store(sums + row * chunks + chunk, tl.sum(weight.to(tl.float64), 0))
    below = tl.div_rn(best, temperature) - scaled
    packed = tl.where(column < V, (weight / WEIGHT_UNIT).to(tl.int64) + ONE_TOKEN, 0)
    index = tl.arange(0, CUTS)
    found = tl.zeros([CUTS], tl.int64)
    for cut in tl.static_range(CUTS):
        if cut == CUTS - 1:
            above = tl.sum(packed, 0)
        else:
            above = tl.sum(tl.where(below <= 0.25 * ((cut + 1) * (cut + 2)), packed, 0), 0)
        found = tl.where(index == cut, above, found)
    tl.store(cells + (row * chunks + chunk) * CUTS + index, found)


@triton.jit
def gather(
    lists, counts, cuts, cells, sums, logits, highest, records, slots, V, chunks, CAPACITY: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """A chunk's part of its row's list of token ids; the number of ids in all, and the cut's distance, go to counts, cuts."""
    trigger(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    record = records + tl.load(slots + row) * WORDS
    temperature = number(record, TEMPERATURE)
    best = tl.load(highest + row)
    if (temperature <= 0.0) | (best == float("inf")) | (best == float("-inf")):
        return
    top_k, top_p, min_p, filtered = filters(record, V)
    if filtered == 0:
        return
    index = tl.arange(0, CUTS)
    each = tl.arange(0, BLOCK_C)
    there = each < chunks
    parts = tl.load(cells + (row * chunks + each[:, None]) * CUTS + index[None, :], mask=there[:, None], other=0)
    number_of = parts >> COUNT_AT
    weight_of = parts & WEIGHT_MASK
    count = tl.sum(number_of, 0)
    weight = tl.sum(weight_of, 0).to(tl.float64) * WEIGHT_UNIT
    total = tl.sum(tl.load(sums + row * chunks + each, mask=there, other=0.0), 0)
    far = distance(index)
    # Fixed-point weights are a little short, and sums differ in their last bits: a cut has to hold clearly enough.
    wanted = tl.where(top_p < 1.0, top_p * 1.001 * total, float("inf"))
    enough = tl.where(top_k > 0, count >= top_k, weight > wanted)
    enough |= tl.exp(-far) < min_p * 0.99
    cut = tl.min(tl.where(enough, index, CUTS - 1), 0)
    size = tl.sum(tl.where(index == cut, count, 0), 0)
    reach = tl.sum(tl.where(index == cut, far, 0.0), 0)
    if chunk == 0:
        tl.store(counts + row, size.to(tl.int32))
        tl.store(cuts + row, reach)
    if size > CAPACITY:
        return
    mine = tl.sum(tl.where(index[None, :] == cut, number_of, 0), 1)
    offset = tl.sum(tl.where(each < chunk, mine, 0), 0)
    column = chunk * BLOCK + tl.arange(0, BLOCK)
    scaled, _ = weights(logits, row, column, V, best, temperature)
    below = tl.div_rn(best, temperature) - scaled
    inside = (column < V) & (below <= reach)
    place = offset + tl.cumsum(inside.to(tl.int32), 0) - 1
    tl.store(lists + row * CAPACITY + place, column, mask=inside)


@triton.jit
def ordered(value):
    """int32 that order as float32 do; both zeros are one."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def candidates(logits, lists, row, start, count, listed, V, best, temperature, CAPACITY: tl.constexpr, TILE: tl.constexpr):
    """Token ids, scaled logits and weights of candidates start .. start + TILE; weight 0 behind the last."""
    place = start + tl.arange(0, TILE)
    if listed:
        token = tl.load(lists + row * CAPACITY + place, mask=place < count, other=V)
    else:
        token = place
    scaled, weight = weights(logits, row, token, V, best, temperature)
    return token, scaled, weight


@triton.jit
def least(
    low, high, bound, floor, logits, lists, row, count, listed, V, best, temperature, BY_WEIGHT: tl.constexpr,
    CAPACITY: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """The least key of low + 1 .. high above which there is less than ``bound``: so at high, and not at low.

    Keys are those of scaled logits, and number tokens; or, BY_WEIGHT, the bits of weights, and sum the weights of those
    tokens whose scaled logit's key is not below ``floor``.
    """
    part = tl.arange(0, WAYS)
    while high - low > 1:
        step = (high - low + WAYS - 1) // WAYS
        keys = tl.minimum(low + step * (part + 1), high)
        above = tl.zeros([WAYS], tl.float64)
        for start in range(0, count, TILE):
            token, scaled, weight = candidates(logits, lists, row, start, count, listed, V, best, temperature, CAPACITY, TILE)
            if BY_WEIGHT:
                kept = tl.where(ordered(scaled) >= floor, weight, 0.0)
                key = kept.to(tl.int32, bitcast=True)
            else:
                kept = tl.where(token < V, 1.0, 0.0)
                key = ordered(scaled)
            hit = key.to(tl.int64)[None, :] > keys[:, None]
            above += tl.sum(tl.where(hit, kept[None, :], 0.0), 1).to(tl.float64)
        fits = (above < bound) | (keys >= high)
        # Neither is used before both are known.
        lower = tl.max(tl.where(fits, low, keys), 0)
        high = tl.min(tl.where(fits, keys, high), 0)
        low = lower
    return high


@triton.jit
def settle(
    tokens, lists, counts, cuts, sums, logits, highest, records, slots, lengths, V, chunks, CAPACITY: tl.constexpr,
    TILE: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One program a row that filters: its thresholds, then the draw."""
    trigger(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    record = records + tl.load(slots + row) * WORDS
    temperature = number(record, TEMPERATURE)
    best = tl.load(highest + row)
    if (temperature <= 0.0) | (best == float("inf")) | (best == float("-inf")):
        return
    top_k, top_p, min_p, filtered = filters(record, V)
    if filtered == 0:
        return
    count = tl.load(counts + row)
    listed = count <= CAPACITY
    if not listed:
        count = V
    far = tl.load(cuts + row)
    most = tl.div_rn(best, temperature)
    # A cut is where a difference of floats rounds to: a little below it is surely below all that the list holds.
    floor = ordered(most - far * 1.001 - 1e-3 * tl.abs(most)).to(tl.int64) - 1
    if top_k > 0:
        high = ordered(most).to(tl.int64)
        bound = top_k.to(tl.float64)
        floor = least(floor, high, bound, floor, logits, lists, row, count, listed, V, best, temperature, False, CAPACITY, TILE)
    threshold = min_p.to(tl.int32, bitcast=True).to(tl.int64)
    if top_p < 1.0:
        if top_k > 0:
            total = 0.0
            total = total.to(tl.float64)
            for start in range(0, count, TILE):
                token, scaled, weight = candidates(
                    logits, lists, row, start, count, listed, V, best, temperature, CAPACITY, TILE
                )  # fmt: skip
                total += tl.sum(tl.where(ordered(scaled) >= floor, weight, 0.0).to(tl.float64), 0)
        else:
            each = tl.arange(0, BLOCK_C)
            total = tl.sum(tl.load(sums + row * chunks + each, mask=each < chunks, other=0.0), 0)
        one = tl.full([], 0x3F800000, tl.int64)
        nucleus = least(
            one * 0 - 1, one, top_p.to(tl.float64) * total, floor, logits, lists, row, count, listed, V, best, temperature,
            True, CAPACITY, TILE
        )  # fmt: skip
        threshold = tl.maximum(threshold, nucleus)
    # min_p above 1 would drop all.
    threshold = tl.minimum(threshold, 0x3F800000)
    u = uniform(tl.load(record + SEED_LOW), tl.load(record + SEED_HIGH), tl.load(lengths + row))
    kept_sum = tl.zeros([], tl.float64)
    for start in range(0, count, TILE):
        token, scaled, weight = candidates(logits, lists, row, start, count, listed, V, best, temperature, CAPACITY, TILE)
        kept = (ordered(scaled) >= floor) & (weight.to(tl.int32, bitcast=True) >= threshold)
        kept_sum += tl.sum(tl.where(kept, weight, 0.0).to(tl.float64), 0)
    target = u * kept_sum
    before = tl.zeros([], tl.float64)
    found = tl.full([], NONE, tl.int32)
    last = tl.full([], 0, tl.int32)
    for start in range(0, count, TILE):
        token, scaled, weight = candidates(logits, lists, row, start, count, listed, V, best, temperature, CAPACITY, TILE)
        kept = (ordered(scaled) >= floor) & (weight.to(tl.int32, bitcast=True) >= threshold) & (weight > 0.0)
        share = tl.where(kept, weight, 0.0).to(tl.float64)
        passed = kept & (tl.cumsum(share, 0) + before > target)
        found = tl.minimum(found, tl.min(tl.where(passed, token, NONE), 0))
        last = tl.maximum(last, tl.max(tl.where(kept, token, 0), 0))
        before += tl.sum(share, 0)
    tl.store(tokens + row, tl.minimum(found, last))
