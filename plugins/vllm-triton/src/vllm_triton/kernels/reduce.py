"""Sums and gathers over the ranks of one host through memory that every rank can write to: mailboxes.

A program is a lane: it takes rows `lane`, `lane + lanes`, ... one after the other, on every rank the same. It writes its row
into a mailbox of each other rank and reads its own until the rows of the others are there: an empty mailbox holds words that
no rank sends, so that no flags are needed. What was read is emptied at once. The mailboxes of a lane rotate over three rows: a
rank writes to one again when it has read both rows that the owner sent after it had emptied that one. The emptying store must
not arrive later than the second of these: before every other row a lane waits until the whole system sees what it stored
(`_settle`), and between two kernels the end of the first one does the same. Lanes start in the order of their numbers, so the
first unfinished one of all is always running on every rank, however few fit.

Every rank sends all it has to each other one. Two ranks cannot do with fewer bytes; more of them can, beyond small sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_triton.kernels.pdl import trigger, wait

PHASES = tl.constexpr(3)
SETTLED = tl.constexpr(2)
"""Rows of a lane from one `_settle` to the next: fewer than there are phases."""
EMPTY = tl.constexpr(-0x7FFF8000)
"""The word of an empty mailbox, 0x80008000: minus zero twice in 16 bits, in 32 the negative number 4.6e-41."""
SPINS = tl.constexpr(65536)
"""Reads of a mailbox between two looks at `stop`, which lies in memory of the host."""
GIVEN_UP = tl.constexpr(-1)
"""The phase of a lane that saw `stop`: it waits no more, in this call and in all that follow."""


@triton.jit
def _receive(box, mask, phase, stop):
    """Words of a mailbox once none is empty, which are emptied; whatever is there when somebody says stop. And the phase."""
    got = tl.load(box, mask=mask, other=0, volatile=True)
    missing = tl.max((got == EMPTY).to(tl.int32), 0)
    if phase == GIVEN_UP:
        missing = 0
    spins = 0
    while missing > 0:
        got = tl.load(box, mask=mask, other=0, volatile=True)
        missing = tl.max((got == EMPTY).to(tl.int32), 0)
        spins += 1
        if spins % SPINS == 0:
            if tl.load(stop, volatile=True) != 0:
                phase = GIVEN_UP
                missing = 0
    tl.store(box, tl.full(got.shape, EMPTY, tl.int32), mask=mask)
    return got, phase


@triton.jit
def _mailbox(base, phase, rank, offset, slot_words, WORLD: tl.constexpr):
    """Where the words from `rank` lie in the memory at ``base``; the hint makes them travel 16 bytes at a time."""
    slot = base.to(tl.pointer_type(tl.int32)) + (phase * WORLD + rank).to(tl.int64) * slot_words
    return tl.multiple_of(slot + offset, 16)


@triton.jit
def _send(bases, words, mask, offset, slot_words, phase, RANK: tl.constexpr, WORLD: tl.constexpr):
    """Write this rank's words into its mailbox of each other rank."""
    for rank in tl.static_range(WORLD):
        if rank != RANK:
            box = _mailbox(tl.load(bases + rank), phase, RANK, offset, slot_words, WORLD)
            tl.store(box, words, mask=mask)


@triton.jit
def _settle(word):
    """Wait until all that this program has stored is seen by every rank; ``word`` is any of its own, and keeps its value."""
    tl.debug_barrier()
    tl.atomic_add(word, 0, sem="acq_rel", scope="sys")
    tl.debug_barrier()


@triton.jit
def _next(phase):
    """The phase of the next row; a lane that has given up stays so."""
    following = (phase + 1) % PHASES
    if phase == GIVEN_UP:
        following = phase
    return following


@triton.jit(do_not_specialize=["rows"])
def all_reduce(
    out,
    residual,
    x,
    weight,
    eps,
    bases,
    phases,
    stop,
    rows,
    slot_words,
    lane_words,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    PACK: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Of rows [rows, SIZE]: x = sum over ranks; with NORM instead residual += that sum and out = its RMS norm.

    Rows travel as int32 words of PACK elements; a word that means an empty mailbox is sent as zeros. They are added in the
    order of ranks, so that every rank has the same bits. A slot has `slot_words` words, `lane_words` for each lane.
    """
    trigger(PDL)
    lane = tl.program_id(0)
    words = tl.arange(0, BLOCK // PACK)
    sent = words < SIZE // PACK
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    here = tl.load(bases + RANK)
    offset = lane.to(tl.int64) * lane_words + words
    if NORM:
        w = tl.load(weight + columns, mask=mask, other=0.0)
    wait(PDL)
    phase = tl.load(phases + lane)
    row = lane
    sent_rows = 0
    while row < rows:
        begin = row.to(tl.int64) * SIZE
        phase = _next(phase)
        slot = tl.maximum(phase, 0)
        mine = tl.load(x.to(tl.pointer_type(tl.int32)) + begin // PACK + words, mask=sent, other=0)
        mine = tl.where(mine == EMPTY, 0, mine)
        _send(bases, mine, sent, offset, slot_words, slot, RANK, WORLD)
        if NORM:
            before = tl.load(residual + begin + columns, mask=mask, other=0.0).to(tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        for rank in tl.static_range(WORLD):
            if rank == RANK:
                theirs = mine
            else:
                box = _mailbox(here, slot, rank, offset, slot_words, WORLD)
                theirs, phase = _receive(box, sent, phase, stop)
            total += _unpack(theirs, x.dtype.element_ty, PACK).to(tl.float32)
        if NORM:
            rounded = (before + total).to(residual.dtype.element_ty)
            tl.store(residual + begin + columns, rounded, mask=mask)
            value = rounded.to(tl.float32)
            scale = tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
            tl.store(out + begin + columns, ((scale * value) * w).to(out.dtype.element_ty), mask=mask)
        else:
            tl.store(x + begin + columns, total.to(x.dtype.element_ty), mask=mask)
        row += tl.num_programs(0)
        sent_rows += 1
        if (row < rows) & (sent_rows % SETTLED == 0):
            _settle(phases + lane)
    tl.store(phases + lane, phase)


@triton.jit(do_not_specialize=["rows"])
def all_gather(
    out,
    x,
    bases,
    phases,
    stop,
    rows,
    width,
    slot_words,
    lane_words,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """out [rows, width] = the first columns of the ranks' x [rows, SIZE] side by side; elements of 32 bits, as int32.

    Rows travel in pieces of BLOCK words.
    """
    trigger(PDL)
    lane = tl.program_id(0)
    words = tl.arange(0, BLOCK)
    here = tl.load(bases + RANK)
    offset = lane.to(tl.int64) * lane_words + words
    pieces: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    wait(PDL)
    phase = tl.load(phases + lane)
    piece = lane
    sent_rows = 0
    while piece < rows * pieces:
        row = (piece // pieces).to(tl.int64)
        columns = piece % pieces * BLOCK + words
        sent = columns < SIZE
        phase = _next(phase)
        slot = tl.maximum(phase, 0)
        mine = tl.load(x + row * SIZE + columns, mask=sent, other=0)
        mine = tl.where(mine == EMPTY, 0, mine)
        _send(bases, mine, sent, offset, slot_words, slot, RANK, WORLD)
        for rank in tl.static_range(WORLD):
            if rank == RANK:
                theirs = mine
            else:
                box = _mailbox(here, slot, rank, offset, slot_words, WORLD)
                theirs, phase = _receive(box, sent, phase, stop)
            at = rank * SIZE + columns
            tl.store(out + row * width + at, theirs, mask=sent & (at < width))
        piece += tl.num_programs(0)
        sent_rows += 1
        if (piece < rows * pieces) & (sent_rows % SETTLED == 0):
            _settle(phases + lane)
    tl.store(phases + lane, phase)


@triton.jit
def _unpack(words, dtype: tl.constexpr, PACK: tl.constexpr):
    """Elements of int32 words, the one in the low bits first."""
    if PACK == 1:
        elements = words.to(dtype, bitcast=True)
    else:
        low = (words & 0xFFFF).to(tl.int16).to(dtype, bitcast=True)
        high = (words >> 16).to(tl.int16).to(dtype, bitcast=True)
        elements = tl.interleave(low, high)
    return elements
