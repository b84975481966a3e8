"""Log-probabilities without a sort: the vocabulary in chunks, their largest tokens, then those of the row.

A token's key orders by logit, then by lowest id, and no two are equal: taking the largest key away k times gives the k most
likely tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_triton.kernels.filter import ordered
from vllm_triton.kernels.pdl import trigger, wait

LOWEST = tl.constexpr(-(1 << 63))


@triton.jit(do_not_specialize=["K"])
def survey(
    largest, sums, above, best, logits, tokens, V, chunks, K, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Of a row's chunk: the largest logit, the sum of exp of the distances to it, how many lie above the token's, and the
    keys of the K largest (fewer where the chunk has fewer)."""
    trigger(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    cell = row * chunks + tl.program_id(1)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < V
    value = tl.load(logits + row * V + column, mask=inside, other=float("-inf"))
    highest = tl.max(value, 0)
    safe = tl.where(highest == float("-inf"), 0.0, highest)
    tl.store(largest + cell, highest)
    tl.store(sums + cell, tl.sum(tl.exp(value - safe), 0))
    chosen = tl.load(logits + row * V + tl.load(tokens + row))
    tl.store(above + cell, tl.sum((inside & (value > chosen)).to(tl.int32), 0))
    key = (ordered(value).to(tl.int64) << 32) | (4294967295 - column.to(tl.int64))
    key = tl.where(inside, key, LOWEST)
    for place in range(K):
        top = tl.max(key, 0)
        tl.store(best + cell * K + place, top)
        key = tl.where(key == top, LOWEST, key)


@triton.jit(do_not_specialize=["K"])
def conclude(
    chosen, rank, top_ids, top, largest, sums, above, best, logits, tokens, V, chunks, K, BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Put a row's chunks together; BLOCK_K >= chunks * K."""
    trigger(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK_C)
    there = chunk < chunks
    each = tl.load(largest + row * chunks + chunk, mask=there, other=float("-inf"))
    highest = tl.max(each, 0)
    safe = tl.where(highest == float("-inf"), 0.0, highest)
    parts = tl.load(sums + row * chunks + chunk, mask=there, other=0.0)
    total = safe + tl.log(tl.sum(parts * tl.exp(each - safe), 0))
    tl.store(chosen + row, tl.load(logits + row * V + tl.load(tokens + row)) - total)
    tl.store(rank + row, tl.sum(tl.load(above + row * chunks + chunk, mask=there, other=0), 0) + 1)
    at = tl.arange(0, BLOCK_K)
    key = tl.load(best + row * chunks * K + at, mask=at < chunks * K, other=LOWEST)
    for place in range(K):
        first = tl.max(key, 0)
        bits = (first >> 32).to(tl.int32)
        value = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        tl.store(top + row * K + place, value - total)
        tl.store(top_ids + row * K + place, (4294967295 - (first & 4294967295)).to(tl.int32))
        key = tl.where(key == first, LOWEST, key)
