"""Sums over the ranks of one host through memory that every rank can write to, one program a row.

A program writes its row into a mailbox of each other rank, raises a flag there, waits for the flags of the others and adds
their rows, in the order of ranks, so that every rank has the same bits. Rows of one call and of the next lie in two halves: a
rank can be one call ahead of another and no more, since it waits for the other's flag of the call before.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_triton.kernels.pdl import trigger, wait


@triton.jit
def _await(flag, stop, epoch):
    """Spin until the flag has reached the epoch, or somebody says stop, which lies in host memory and is seldom asked."""
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    spins = 0
    while seen < epoch:
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        spins += 1
        if spins % 65536 == 0:
            if tl.load(stop, volatile=True) != 0:
                seen = epoch


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
    slot_elements,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_BYTES: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Of row [SIZE]: x = sum over ranks; with NORM instead residual += that sum and out = its RMS norm."""
    trigger(PDL)
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    at = row.to(tl.int64) * SIZE + columns
    element = tl.pointer_type(x.dtype.element_ty)
    word = tl.pointer_type(tl.int32)
    if NORM:
        w = tl.load(weight + columns, mask=mask, other=0.0)
    wait(PDL)
    epoch = tl.load(epochs + row) + 1
    half = (epoch & 1) * WORLD
    mine = tl.load(x + at, mask=mask, other=0.0)
    for rank in tl.static_range(WORLD):
        if rank != RANK:
            box = (tl.load(bases + rank) + HEAD_BYTES).to(element) + (half + RANK).to(tl.int64) * slot_elements
            tl.store(box + at, mine, mask=mask)
    # The flag's release covers what the whole program has written before.
    tl.debug_barrier()
    for rank in tl.static_range(WORLD):
        if rank != RANK:
            flag = tl.load(bases + rank).to(word) + RANK * ROWS + row
            tl.atomic_xchg(flag, epoch, sem="release", scope="sys")
    here = tl.load(bases + RANK)
    total = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(WORLD):
        if rank == RANK:
            total += mine.to(tl.float32)
        else:
            _await(here.to(word) + rank * ROWS + row, stop, epoch)
            tl.debug_barrier()
            box = (here + HEAD_BYTES).to(element) + (half + rank).to(tl.int64) * slot_elements
            total += tl.load(box + at, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    tl.store(epochs + row, epoch)
    if NORM:
        rounded = (tl.load(residual + at, mask=mask, other=0.0).to(tl.float32) + total).to(residual.dtype.element_ty)
        tl.store(residual + at, rounded, mask=mask)
        value = rounded.to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
        tl.store(out + at, ((scale * value) * w).to(out.dtype.element_ty), mask=mask)
    else:
        tl.store(x + at, total.to(x.dtype.element_ty), mask=mask)
