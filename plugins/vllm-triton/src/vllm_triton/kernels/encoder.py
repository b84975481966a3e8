"""Encoders: attention without a cache or an order, and one vector per sequence."""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_triton.kernels.attention import LOG2E, absorb
from vllm_triton.kernels.codec import PLAIN
from vllm_triton.kernels.pdl import trigger, wait

MEAN = tl.constexpr(0)
CLS = tl.constexpr(1)


@triton.jit(do_not_specialize=["num_rows"])
def attention(
    out, q, k, v, query_start, num_rows, q_token, q_head, k_token, k_head, v_token, v_head, out_token, out_head, scale,
    G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr
):  # fmt: skip
    """One query head, and BLOCK_M queries of one row, over all keys [T, Hk, D] of the row.

    Row s has tiles from query_start[s] // BLOCK_M + s on, one more than it may need: found by bisection.
    """
    head = tl.program_id(0)
    tile = tl.program_id(1)
    low, high = 0, num_rows
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_start + middle) // BLOCK_M + middle <= tile:
            low = middle + 1
        else:
            high = middle
    row = low - 1
    begin = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - begin
    first = (tile - (begin // BLOCK_M + row)) * BLOCK_M
    if first >= count:
        return
    local = first + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_D)
    inside = (local < count)[:, None] & (columns < D)[None, :]
    token = (begin + local).to(tl.int64)
    query = tl.load(q + token[:, None] * q_token + head * q_head + columns[None, :], mask=inside, other=0.0)
    total = tl.zeros([BLOCK_M], tl.float32)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    source = (head // G).to(tl.int64)
    for start in tl.range(0, count, BLOCK_N, num_stages=STAGES):
        key = start + tl.arange(0, BLOCK_N)
        there = (key < count)[:, None] & (columns < D)[None, :]
        at = (begin + key).to(tl.int64)[:, None]
        keys = tl.load(k + at * k_token + source * k_head + columns[None, :], mask=there, other=0.0)
        values = tl.load(v + at * v_token + source * v_head + columns[None, :], mask=there, other=0.0)
        product = tl.dot(query, tl.trans(keys), input_precision="ieee") * (scale * LOG2E)
        product = tl.where((key < count)[None, :], product, float("-inf"))
        total, largest, acc = absorb(product, values, 1.0, total, largest, acc, PLAIN)
    target = out + token[:, None] * out_token + head * out_head + columns[None, :]
    tl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)


@triton.jit
def pool(
    out, x, query_start, x_row, SIZE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_T: tl.constexpr, KIND: tl.constexpr,
    NORMALIZE: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """float32 out [S, SIZE]: one program a row's mean, first or last token, of length 1 if asked."""
    trigger(PDL)
    wait(PDL)
    row = tl.program_id(0)
    begin = tl.load(query_start + row)
    end = tl.load(query_start + row + 1)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    if KIND == MEAN:
        sums = tl.zeros([BLOCK], tl.float32)
        for start in range(begin, end, BLOCK_T):
            token = start + tl.arange(0, BLOCK_T)
            inside = (token < end)[:, None] & mask[None, :]
            part = tl.load(x + token.to(tl.int64)[:, None] * x_row + columns[None, :], mask=inside, other=0.0)
            sums += tl.sum(part.to(tl.float32), 0)
        result = sums / tl.maximum(end - begin, 1)
    else:
        if KIND == CLS:
            chosen = begin
        else:
            chosen = end - 1
        result = tl.load(x + chosen.to(tl.int64) * x_row + columns, mask=mask, other=0.0).to(tl.float32)
    if NORMALIZE:
        result = result / tl.maximum(tl.sqrt(tl.sum(result * result, 0)), 1e-12)
    tl.store(out + row.to(tl.int64) * SIZE + columns, result, mask=mask)
