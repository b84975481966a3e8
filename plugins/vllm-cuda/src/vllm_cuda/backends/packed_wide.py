"""Tiles of the product of many rows with a packed weight on Hopper (`kernels/packed_wide.cu`). Measured on an H200."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from vllm_cuda.chip import Chip
from vllm_cuda.packed_tiles import DEPTH, Layout, WideForm, WideTile

LEAST, MOST = 33, 512
"""Rows of x for which this kernel was the faster one, of weights that are not small."""

SMALL, SMALL_LEAST, SMALL_MOST = 8 << 20, 65, 128
"""Elements of a small weight, and rows of x for these."""

COLUMNS = (5, 6, 8, 10, 12, 16)
"""Times 8 rows of x, of a tile: few, so that there are few forms."""

MOST_SHARES, MOST_STAGES = 8, 10
TENSOR, WIDEN, BRING = 4, 200, 2
"""Cycles of a stage on a multiprocessor: of tensor cores for 64 rows of the weight, for each row of x; of instructions for 64
rows of the weight; of those that bring x, for each of its rows. One comes after the other."""

LAUNCH, PUT = 2500, 10
"""Cycles of a launch; and of a tile that programs share, for each row of x and program."""


def wide_tile(count: int, rows: int, columns: int, layout: Layout, gated: bool, chip: Chip) -> WideTile | None:
    """The tile that should take the least time for out [count, rows] of x [count, columns]; None where another kernel does.

    A layer of Qwen3 8B at 33, 48, 64, 96, 128, 256 and 512 rows took 70, 74, 83, 104, 120, 205 and 377 us in four bits in
    groups of 128; without this kernel 87, 89, 107, 213 of 128, 287 of 256 and 408 of 512. Eight bits with a scale a row took
    75, 79, 84, 101, 121, 203 and 350; without it 79, 81, 99, 195 of 128 and 427 of 512. Of 17 to 32 rows both kernels differ
    by less than 10 %, either way.
    """
    halves = 2 if gated else 1
    small = halves * rows * columns < SMALL
    least, most = (SMALL_LEAST, SMALL_MOST) if small else (LEAST, MOST)
    if chip.architecture != "sm_90" or not least <= count <= most:
        return None
    found = _tiles(count, halves * rows, columns, chip)
    return _staged(min(found, key=lambda tile: _cycles(tile, count, halves * rows, columns, chip)), columns, layout, chip)


def _tiles(count: int, rows: int, columns: int, chip: Chip) -> Iterator[WideTile]:
    spans = -(-count // (8 * COLUMNS[-1]))
    wanted = next(one for one in COLUMNS if 8 * one * spans >= count)
    for groups, bands in ((2, 1), (3, 1), (2, 2)):
        for shares in range(1, MOST_SHARES + 1):
            tile = WideTile(groups, bands, wanted, shares, 2)
            # Programs that share a tile wait for one another: all must have room.
            if shares == 1 or (_programs(tile, count, rows) <= chip.multiprocessors and shares <= -(-columns // DEPTH)):
                yield tile


def _programs(tile: WideTile, count: int, rows: int) -> int:
    return -(-rows // tile.rows) * -(-count // (8 * tile.columns)) * tile.shares


def _cycles(tile: WideTile, count: int, rows: int, columns: int, chip: Chip) -> int:
    tokens, stages = 8 * tile.columns, -(-columns // DEPTH // tile.shares)
    stage = tile.rows // 64 * (TENSOR * tokens + WIDEN) + BRING * tokens
    waves = -(-_programs(tile, count, rows) // chip.multiprocessors)
    return waves * (stages * stage + LAUNCH + (PUT * tokens * tile.shares if tile.shares > 1 else 0))


def _staged(tile: WideTile, columns: int, layout: Layout, chip: Chip) -> WideTile:
    """The tile with as many stages as the shared memory holds and K has use for."""
    for stages in range(min(MOST_STAGES, -(-columns // DEPTH // tile.shares) + 1), 2, -1):
        found = replace(tile, stages=stages)
        if WideForm(layout, found, 0, 0, False, False, False).shared_bytes <= chip.shared_bytes:
            return found
    return tile
