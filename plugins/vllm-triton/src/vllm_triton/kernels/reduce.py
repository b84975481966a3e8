"""Sums over the ranks of one host through memory that every rank can write to, one program a row.

A program writes its row into a mailbox of each other rank and reads its own mailboxes until the rows of the others are
there: an empty mailbox holds words that no rank sends, so that neither flags nor fences are needed. Rows are added in the
order of ranks, so that every rank has the same bits. Mailboxes rotate over three calls. A call empties those of the call
before: a rank writes to them two calls later, when it has read a row that this rank sent after it had emptied them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_triton.kernels.pdl import trigger, wait

PHASES = tl.constexpr(3)
SPINS = tl.constexpr(65536)
"""Reads of a mailbox between two looks at `stop`, which lies in memory of the host."""


@triton.jit
def _receive(box, mask, stop, EMPTY: tl.constexpr):
    """Words of a mailbox once none is empty, or whatever is there when somebody says stop."""
    got = tl.load(box, mask=mask, other=0, volatile=True)
    missing = tl.max((got == EMPTY).to(tl.int32), 0)
    spins = 0
    while missing > 0:
        got = tl.load(box, mask=mask, other=0, volatile=True)
        missing = tl.max((got == EMPTY).to(tl.int32), 0)
        spins += 1
        if spins % SPINS == 0:
            if tl.load(stop, volatile=True) != 0:
                missing = 0
    return got


@triton.jit
def all_reduce(
    out,
    residual,
    x,
    weight,
    eps,
    bases,
    epochs,
    stop,
    slot_words,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    EMPTY: tl.constexpr,
    PACK: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Of row [SIZE]: x = sum over ranks; with NORM instead residual += that sum and out = its RMS norm.

    Rows travel as int32 words of PACK elements; a word that means an empty mailbox is sent as zeros, which is what it was.
    """
    trigger(PDL)
    row = tl.program_id(0)
    words = tl.arange(0, BLOCK // PACK)
    sent = words < SIZE // PACK
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    at = row.to(tl.int64) * SIZE + columns
    word = tl.pointer_type(tl.int32)
    if NORM:
        w = tl.load(weight + columns, mask=mask, other=0.0)
    wait(PDL)
    epoch = tl.load(epochs + row) + 1
    phase = epoch % PHASES
    before = (epoch + PHASES - 1) % PHASES
    place = row.to(tl.int64) * (SIZE // PACK) + words
    mine = tl.load(x.to(word) + place, mask=sent, other=0)
    mine = tl.where(mine == EMPTY, 0, mine)
    for rank in tl.static_range(WORLD):
        if rank != RANK:
            box = tl.load(bases + rank).to(word) + (phase * WORLD + RANK).to(tl.int64) * slot_words
            tl.store(box + place, mine, mask=sent)
    here = tl.load(bases + RANK).to(word)
    total = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(WORLD):
        if rank == RANK:
            theirs = mine
        else:
            empty = here + (before * WORLD + rank).to(tl.int64) * slot_words + place
            tl.store(empty, tl.full([BLOCK // PACK], EMPTY, tl.int32), mask=sent)
            box = here + (phase * WORLD + rank).to(tl.int64) * slot_words + place
            theirs = _receive(box, sent, stop, EMPTY)
        total += _unpack(theirs, x.dtype.element_ty, PACK).to(tl.float32)
    tl.store(epochs + row, epoch)
    if NORM:
        rounded = (tl.load(residual + at, mask=mask, other=0.0).to(tl.float32) + total).to(residual.dtype.element_ty)
        tl.store(residual + at, rounded, mask=mask)
        value = rounded.to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
        tl.store(out + at, ((scale * value) * w).to(out.dtype.element_ty), mask=mask)
    else:
        tl.store(x + at, total.to(x.dtype.element_ty), mask=mask)


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
