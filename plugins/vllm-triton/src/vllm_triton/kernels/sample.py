"""Sampling without a sort, of logits that are read once: the vocabulary in chunks. `kernels.filter` is for rows that filter.

`measure` finds each chunk's largest logit, and sums exp((logit - that) / temperature) in float64. `draw` finds the chunk in
which the cumulative weight passes u times the total, and the token in it. u comes from Philox4x32-10 (Salmon et al. 2011),
counter (length, 0, 0, 0), key the request's seed. A row's result depends on that row alone, whatever the number of rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_core.api import batch as layout
from vllm_triton.kernels.pdl import trigger, wait

WORDS = tl.constexpr(layout.ADMIT_WORDS)
TEMPERATURE = tl.constexpr(layout.A_TEMPERATURE)
TOP_K = tl.constexpr(layout.A_TOP_K)
TOP_P = tl.constexpr(layout.A_TOP_P)
MIN_P = tl.constexpr(layout.A_MIN_P)
SEED_LOW = tl.constexpr(layout.A_SEED_LOW)
SEED_HIGH = tl.constexpr(layout.A_SEED_HIGH)
NONE = tl.constexpr(2147483647)
"""No token: larger than all."""


@triton.jit
def number(record, COLUMN: tl.constexpr):
    """A float32 of a request's record."""
    return tl.load(record + COLUMN).to(tl.float32, bitcast=True)


@triton.jit
def filters(record, V):
    """A request's top_k (0: off), top_p, min_p, and whether any of them drops tokens."""
    top_k = tl.load(record + TOP_K)
    top_k = tl.where((top_k > 0) & (top_k < V), top_k, 0)
    top_p = number(record, TOP_P)
    min_p = number(record, MIN_P)
    return top_k, top_p, min_p, (top_k > 0) | (top_p < 1.0) | (min_p > 0.0)


@triton.jit
def measure(
    largest, where, sums, logits, records, slots, V, chunks, BLOCK: tl.constexpr, WEIGH: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Largest logit of a row's chunk and its lowest index; NaN and +inf win over all. WEIGH: the sum of the chunk's weights
    relative to its largest; rows at temperature 0 have none."""
    trigger(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    column = chunk * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + row * V + column, mask=column < V, other=float("-inf"))
    value = tl.where(value == value, value, float("inf"))
    highest = tl.max(value, 0)
    tl.store(largest + row * chunks + chunk, highest)
    index = tl.where((value == highest) & (column < V), column, NONE)
    tl.store(where + row * chunks + chunk, tl.min(index, 0))
    if WEIGH:
        temperature = number(records + tl.load(slots + row) * WORDS, TEMPERATURE)
        if temperature > 0.0:
            _, weight = relative(value, highest, temperature)
            # A chunk of nothing but -inf has no largest.
            weight = tl.where(highest == float("-inf"), 0.0, weight)
            tl.store(sums + row * chunks + chunk, tl.sum(weight.to(tl.float64), 0))


@triton.jit
def pick(tokens, nonfinite, highest, largest, where, chunks, BLOCK_C: tl.constexpr, PDL: tl.constexpr):
    """The greedy token of a row, and whether its logits are unusable."""
    trigger(PDL)
    wait(PDL)
    row = tl.program_id(0)
    chunk = tl.arange(0, BLOCK_C)
    value = tl.load(largest + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    best = tl.max(value, 0)
    index = tl.load(where + row * chunks + chunk, mask=chunk < chunks, other=NONE)
    tl.store(tokens + row, tl.min(tl.where(value == best, index, NONE), 0))
    tl.store(nonfinite + row, (best == float("inf")) | (best == float("-inf")))
    tl.store(highest + row, best)


@triton.jit
def relative(value, best, temperature):
    """Logits scaled by the temperature, and exp of their distance to ``best``, scaled too."""
    scaled = tl.div_rn(value, tl.zeros_like(value) + temperature)
    return scaled, tl.exp(scaled - tl.div_rn(best, temperature))


@triton.jit
def weights(logits, row, column, V, best, temperature):
    """`relative` of columns of a row, as if -inf behind the end."""
    return relative(tl.load(logits + row * V + column, mask=column < V, other=float("-inf")), best, temperature)


@triton.jit
def uniform(low, high, position):
    """The first word of Philox4x32-10 over 2**32, in float64."""
    c0 = position.to(tl.uint32)
    c1 = c0 * 0
    c2 = c0 * 0
    c3 = c0 * 0
    k0 = low.to(tl.uint32, bitcast=True)
    k1 = high.to(tl.uint32, bitcast=True)
    for _ in tl.static_range(10):
        p0 = c0.to(tl.uint64) * 0xD2511F53
        p1 = c2.to(tl.uint64) * 0xCD9E8D57
        next0 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0
        next2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = p1.to(tl.uint32)
        c3 = p0.to(tl.uint32)
        c0 = next0
        c2 = next2
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return c0.to(tl.float64) * 2.3283064365386963e-10


@triton.jit
def draw(
    tokens, sums, logits, largest, highest, records, slots, lengths, V, chunks, FILTERS: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """The first token, in index order, at which the cumulative weight exceeds u times the total.

    Sums are relative to the largest of each chunk. FILTERS: rows that filter are left to `kernels.filter`.
    """
    trigger(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    record = records + tl.load(slots + row) * WORDS
    temperature = number(record, TEMPERATURE)
    best = tl.load(highest + row)
    if (temperature <= 0.0) | (best == float("inf")) | (best == float("-inf")):
        return
    if FILTERS:
        _top_k, _top_p, _min_p, filtered = filters(record, V)
        if filtered:
            return
    u = uniform(tl.load(record + SEED_LOW), tl.load(record + SEED_HIGH), tl.load(lengths + row))
    chunk = tl.arange(0, BLOCK_C)
    top = tl.load(largest + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    _, shift = relative(top, best, temperature)
    parts = tl.load(sums + row * chunks + chunk, mask=chunk < chunks, other=0.0) * shift
    running = tl.cumsum(parts, 0)
    target = u * tl.sum(parts, 0)
    passed = (running > target) & (chunk < chunks)
    # Rounding may leave the total below the target: then the last chunk with any weight has it.
    found = tl.min(tl.where(passed, chunk, NONE), 0)
    last = tl.max(tl.where(parts > 0.0, chunk, 0), 0)
    found = tl.minimum(found, last)
    before = tl.sum(tl.where(chunk < found, parts, 0.0), 0)
    column = found * BLOCK + tl.arange(0, BLOCK)
    _, weight = weights(logits, row, column, V, tl.max(tl.where(chunk == found, top, float("-inf")), 0), temperature)
    inner = tl.cumsum(weight.to(tl.float64), 0) * tl.sum(tl.where(chunk == found, shift, 0.0), 0) + before
    token = tl.min(tl.where(inner > target, column, NONE), 0)
    heaviest = tl.max(tl.where(weight > 0.0, column, 0), 0)
    tl.store(tokens + row, tl.minimum(token, heaviest))
