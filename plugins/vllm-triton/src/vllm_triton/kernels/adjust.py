"""Logits changed by what requests ask for: penalties, bias, suppressed stop tokens, bad words, grammar masks, soft cap.

Penalties count tokens in a table of int32 [rows, V] that is zero before and after: `count_tokens` adds each known token to
its cell, `penalise` takes the cells back to zero, and whoever finds one that is not zero changes that token's logit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_core.api import batch as layout
from vllm_triton.kernels.pdl import trigger, wait
from vllm_triton.kernels.sample import WORDS, number

FEATURES = tl.constexpr(layout.A_FEATURES)
PENALTIES = tl.constexpr(layout.F_PENALTIES)
BIAS = tl.constexpr(layout.F_BIAS)
MIN_LEN = tl.constexpr(layout.F_MIN_LEN)
BAD_WORDS = tl.constexpr(layout.F_BAD_WORDS)
PROMPT_LEN = tl.constexpr(layout.A_PROMPT_LEN)
REPETITION = tl.constexpr(layout.A_REPETITION)
PRESENCE = tl.constexpr(layout.A_PRESENCE)
FREQUENCY = tl.constexpr(layout.A_FREQUENCY)
SHORTEST = tl.constexpr(layout.A_MIN_LEN)
NUM_BIAS = tl.constexpr(layout.A_NUM_BIAS)
NUM_STOP = tl.constexpr(layout.A_NUM_STOP)
NUM_BAD = tl.constexpr(layout.A_NUM_BAD)
MAX_BIAS = tl.constexpr(layout.MAX_BIAS)
MAX_STOP = tl.constexpr(layout.MAX_STOP)
MAX_BAD = tl.constexpr(layout.MAX_BAD_WORDS)

IN_PROMPT = tl.constexpr(1 << 30)
"""Bit of a token's cell: it is in the prompt. The bits below count it in the output."""


@triton.jit
def asked(record, FEATURE: tl.constexpr):
    """Whether a request has the feature."""
    return (tl.load(record + FEATURES) & FEATURE) != 0


@triton.jit(do_not_specialize=["first", "width"])
def count_tokens(counts, known, records, slots, lengths, first, V, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Add BLOCK known tokens of row first + program to the row's cells of int32 counts [rows, V]."""
    trigger(PDL)
    wait(PDL)
    row = first + tl.program_id(0)
    slot = tl.load(slots + row)
    record = records + slot * WORDS
    begin = tl.program_id(1) * BLOCK
    length = tl.load(lengths + row)
    if begin >= length:
        return
    if asked(record, PENALTIES):
        at = begin + tl.arange(0, BLOCK)
        inside = at < length
        token = tl.load(known + slot * width + at, mask=inside, other=0)
        cell = counts + tl.program_id(0).to(tl.int64) * V + token
        in_prompt = at < tl.load(record + PROMPT_LEN)
        tl.atomic_or(cell, tl.zeros_like(token) + IN_PROMPT, mask=inside & in_prompt, sem="relaxed")
        tl.atomic_add(cell, tl.zeros_like(token) + 1, mask=inside & (in_prompt == 0), sem="relaxed")


@triton.jit(do_not_specialize=["first", "width"])
def penalise(logits, counts, known, records, slots, lengths, first, V, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Take the cells of BLOCK known tokens back to zero, and penalise each token once."""
    trigger(PDL)
    wait(PDL)
    row = first + tl.program_id(0)
    slot = tl.load(slots + row)
    record = records + slot * WORDS
    begin = tl.program_id(1) * BLOCK
    length = tl.load(lengths + row)
    if begin >= length:
        return
    if asked(record, PENALTIES):
        at = begin + tl.arange(0, BLOCK)
        inside = at < length
        token = tl.load(known + slot * width + at, mask=inside, other=0)
        cell = counts + tl.program_id(0).to(tl.int64) * V + token
        found = tl.atomic_xchg(cell, tl.zeros_like(token), mask=inside, sem="relaxed")
        mine = inside & (found != 0)
        target = logits + row.to(tl.int64) * V + token
        value = tl.load(target, mask=mine, other=0.0)
        repetition = tl.zeros_like(value) + number(record, REPETITION)
        value = tl.where(value > 0.0, tl.div_rn(value, repetition), value * repetition)
        times = (found & (IN_PROMPT - 1)).to(tl.float32)
        value -= number(record, FREQUENCY) * times
        value -= tl.where(times > 0.0, number(record, PRESENCE), 0.0)
        tl.store(target, value, mask=mine)


@triton.jit(do_not_specialize=["width", "features"])
def adjust(
    logits, known, records, bias_ids, bias_values, stop_ids, bad_words, slots, lengths, V, width, features,
    BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One program a row: its bias, then its stop tokens, then the words that it must not complete; BLOCK >= MAX_BAD."""
    trigger(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    record = records + slot * WORDS
    length = tl.load(lengths + row)
    target = logits + row * V
    if asked(record, BIAS) & ((features & BIAS) != 0):
        entry = tl.arange(0, MAX_BIAS)
        inside = entry < tl.load(record + NUM_BIAS)
        token = tl.load(bias_ids + slot * MAX_BIAS + entry, mask=inside, other=0)
        bias = tl.load(bias_values + slot * MAX_BIAS + entry, mask=inside, other=0.0)
        tl.atomic_add(target + token, bias, mask=inside, sem="relaxed")
    # What is forbidden stays so: no bias may be added after it.
    tl.debug_barrier()
    if asked(record, MIN_LEN) & ((features & MIN_LEN) != 0):
        entry = tl.arange(0, MAX_STOP)
        count = tl.where(length < tl.load(record + SHORTEST), tl.load(record + NUM_STOP), 0)
        inside = entry < count
        token = tl.load(stop_ids + slot * MAX_STOP + entry, mask=inside, other=0)
        tl.store(target + token, tl.full([MAX_STOP], float("-inf"), tl.float32), mask=inside)
    if asked(record, BAD_WORDS) & ((features & BAD_WORDS) != 0):
        words = bad_words + slot * MAX_BAD
        end = tl.minimum(tl.load(record + NUM_BAD), MAX_BAD)
        at = tl.full([], 0, tl.int32)
        entry = tl.arange(0, BLOCK)
        while at < end:
            count = tl.load(words + at)
            before = length - (count - 1) + entry
            body = (entry < count - 1) & (at + 1 + entry < MAX_BAD)
            word = tl.load(words + at + 1 + entry, mask=body, other=0)
            context = tl.load(known + slot * width + before, mask=body & (before >= 0), other=0)
            differs = body & ((word != context) | (before < 0))
            if tl.sum(differs.to(tl.int32), 0) == 0:
                tl.store(target + tl.load(words + at + count), float("-inf"))
            at += 1 + tl.maximum(count, 0)


@triton.jit(do_not_specialize_on_alignment=["mask"])
def grammar_mask(logits, mask, rows, V, num_words, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """-inf where a row's bit is 0: one program a masked row and BLOCK tokens."""
    trigger(PDL)
    wait(PDL)
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + index)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < V
    word = tl.load(mask + index * num_words + token // 32, mask=inside, other=-1)
    forbidden = inside & (((word >> (token % 32)) & 1) == 0)
    tl.store(logits + row * V + token, tl.full([BLOCK], float("-inf"), tl.float32), mask=forbidden)


@triton.jit
def soft_cap(logits, cap, count, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """logits = cap * tanh(logits / cap), of ``count`` float32."""
    trigger(PDL)
    wait(PDL)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + at, mask=at < count, other=0.0) / cap
    wide = 1.0 - 2.0 / (1.0 + tl.exp(2.0 * tl.abs(x)))
    # The difference loses digits near 0, where the series converges.
    square = x * x
    near = tl.abs(x) * (1.0 + square * (-0.33333333 + square * (0.13333333 + square * (-0.05396825 + square * 0.02186949))))
    size = tl.where(tl.abs(x) < 0.25, near, wide)
    tl.store(logits + at, cap * tl.where(x < 0.0, -size, size), mask=at < count)
