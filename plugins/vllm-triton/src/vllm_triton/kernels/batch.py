"""The batch state: applying the packed difference, gathering a step's inputs, and advancing.

The packed buffer and the state's tensors are laid out as `vllm_core.api.batch` says; columns come as constants from there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_triton.kernels.pdl import trigger, wait


@triton.jit(do_not_specialize=["admits", "tokens"], do_not_specialize_on_alignment=["packed"])
def admit(
    records, computed, known, packed, admits, tokens, state_width, WORDS: tl.constexpr, BLOCK_WORDS: tl.constexpr,
    SLOT: tl.constexpr, KNOWN: tl.constexpr, COMPUTED: tl.constexpr, BLOCK: tl.constexpr, BLOCK_A: tl.constexpr
):  # fmt: skip
    """One program a request: its record, its number of computed tokens, its known tokens. ``admits`` is the first
    record's offset in the buffer, ``tokens`` that of the first token."""
    index = tl.program_id(0)
    record = packed + admits + index * WORDS
    slot = tl.load(record + SLOT).to(tl.int64)
    column = tl.arange(0, BLOCK_WORDS)
    words = tl.load(record + column, mask=column < WORDS)
    tl.store(records + slot * WORDS + column, words, mask=column < WORDS)
    tl.store(computed + slot, tl.load(record + COMPUTED))
    # Tokens of the requests before.
    begin = 0
    for other in range(0, index, BLOCK_A):
        many = other + tl.arange(0, BLOCK_A)
        begin += tl.sum(tl.load(packed + admits + many * WORDS + KNOWN, mask=many < index, other=0), 0)
    count = tl.load(record + KNOWN)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(packed + tokens + begin + at, mask=at < count)
        tl.store(known + slot * state_width + at, value, mask=at < count)


@triton.jit(do_not_specialize=["admits"], do_not_specialize_on_alignment=["packed"])
def clear_tables(table, packed, admits, width, WORDS: tl.constexpr, SLOT: tl.constexpr, BLOCK: tl.constexpr):
    """The admitted requests' tables hold the null block: one program a request and BLOCK columns."""
    slot = tl.load(packed + admits + tl.program_id(0) * WORDS + SLOT).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(table + slot * width + at, tl.zeros([BLOCK], tl.int32), mask=at < width)


@triton.jit(do_not_specialize=["rows", "count"], do_not_specialize_on_alignment=["packed"])
def put_blocks(table, packed, rows, count, group, width, BLOCK: tl.constexpr):
    """Write the block rows of one group: (group, slot, column, block)."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = packed + rows + at * 4
    mask = at < count
    mine = mask & (tl.load(row, mask=mask, other=-1) == group)
    slot = tl.load(row + 1, mask=mine, other=0).to(tl.int64)
    column = tl.load(row + 2, mask=mine, other=0)
    tl.store(table + slot * width + column, tl.load(row + 3, mask=mine, other=0), mask=mine)


@triton.jit(do_not_specialize=["rows", "count"], do_not_specialize_on_alignment=["packed"])
def put_extras(
    bias_ids, bias_values, stop_ids, bad_words, packed, rows, count, MAX_BIAS: tl.constexpr, MAX_STOP: tl.constexpr,
    MAX_BAD: tl.constexpr, BIAS: tl.constexpr, STOP: tl.constexpr, BAD: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write the extra rows: (kind, slot, index, value, value)."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = packed + rows + at * 5
    mask = at < count
    kind = tl.load(row, mask=mask, other=-1)
    slot = tl.load(row + 1, mask=mask, other=0).to(tl.int64)
    index = tl.load(row + 2, mask=mask, other=0)
    first = tl.load(row + 3, mask=mask, other=0)
    second = tl.load(row + 4, mask=mask, other=0)
    tl.store(bias_ids + slot * MAX_BIAS + index, first, mask=kind == BIAS)
    tl.store(bias_values + slot * MAX_BIAS + index, second.to(tl.float32, bitcast=True), mask=kind == BIAS)
    tl.store(stop_ids + slot * MAX_STOP + index, first, mask=kind == STOP)
    tl.store(bad_words + slot * MAX_BAD + index, first, mask=kind == BAD)


@triton.jit(do_not_specialize=["steps", "num_rows"], do_not_specialize_on_alignment=["packed"])
def build_rows(
    token_ids, positions, slots, query_start, seq_lens, sample_rows, sample_slots, sample_lengths, packed, steps, num_rows,
    computed, known, state_width, BLOCK_S: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One program a row and BLOCK of its tokens: what `StepInputs` says of rows and tokens. ``steps`` is the first row's
    offset in the buffer."""
    trigger(PDL)
    wait(PDL)
    row = tl.program_id(0)
    before, sampled_before = 0, 0
    for other in range(0, row, BLOCK_S):
        many = other + tl.arange(0, BLOCK_S)
        at = packed + steps + many * 4
        before += tl.sum(tl.load(at + 1, mask=many < row, other=0), 0)
        sampled_before += tl.sum(tl.load(at + 2, mask=many < row, other=0), 0)
    mine = packed + steps + row * 4
    slot = tl.load(mine)
    count = tl.load(mine + 1)
    start = tl.load(computed + slot)
    chunk = tl.program_id(1) * BLOCK
    local = chunk + tl.arange(0, BLOCK)
    inside = local < count
    tokens = tl.load(
        known + slot.to(tl.int64) * state_width + start + local, mask=inside & (start + local < state_width), other=0
    )
    tl.store(token_ids + before + local, tokens, mask=inside)
    tl.store(positions + before + local, start + local, mask=inside)
    if chunk == 0:
        tl.store(slots + row, slot)
        tl.store(query_start + row + 1, before + count)
        if row == 0:
            tl.store(query_start, 0)
        tl.store(seq_lens + row, start + count)
        if tl.load(mine + 2) == 1:
            tl.store(sample_rows + sampled_before, (before + count - 1).to(tl.int64))
            tl.store(sample_slots + sampled_before, slot.to(tl.int64))
            tl.store(sample_lengths + sampled_before, start + count)


@triton.jit(do_not_specialize=["width"])
def build_group(
    mapping, tables, slots, query_start, seq_lens, table, state_width, width, size, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One program a row and BLOCK of its tokens or table columns: slot mapping and block table of one KV group."""
    trigger(PDL)
    wait(PDL)
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    begin = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - begin
    start = tl.load(seq_lens + row) - count
    local = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = local < count
    position = start + local
    block = tl.load(table + slot * state_width + position // size, mask=inside, other=0).to(tl.int64)
    tl.store(mapping + begin + local, block * size + position % size, mask=inside)
    column = local < width
    value = tl.load(table + slot * state_width + local, mask=column, other=0)
    tl.store(tables + row * width + local, value, mask=column)


@triton.jit(do_not_specialize=["num_rows", "num_sampled"])
def advance(
    computed, known, slots, seq_lens, sample_slots, sample_lengths, tokens, num_rows, num_sampled, num_slots, state_width,
    BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """computed[slot] = seq_len, 0 for the padding slot; sampled tokens go behind their sequences where they fit."""
    trigger(PDL)
    wait(PDL)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = at < num_rows
    slot = tl.load(slots + at, mask=row, other=0)
    length = tl.load(seq_lens + at, mask=row, other=0)
    tl.store(computed + slot, tl.where(slot == num_slots, 0, length), mask=row)
    sampled = at < num_sampled
    owner = tl.load(sample_slots + at, mask=sampled, other=0)
    end = tl.load(sample_lengths + at, mask=sampled, other=0)
    token = tl.load(tokens + at, mask=sampled, other=0)
    tl.store(known + owner * state_width + end, token, mask=sampled & (end < state_width))
