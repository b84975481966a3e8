"""Tiles of the product with a packed weight, for all families. Measured on an H200, on the products of a layer of Qwen3 8B."""

from __future__ import annotations

from dataclasses import replace

from vllm_cuda.chip import Chip, depends
from vllm_cuda.packed_tiles import BLOCK, DEPTH, INT4, UNITS, Layout, PackedForm, PackedTile

MOST_BLOCKS = 12
"""Blocks of rows of a tile, at most."""

WARPS, MOST_WARPS = 8, 12
"""Of a program: usually, and at most where there are many rows of x."""

SHARED_BYTES = 110 << 10
"""Of a program, where that is enough: the next kernel's then finds room beside it, and its weights are on the way."""


def tile_of(groups: int, rows: int, columns: int, layout: Layout, gated: bool, chip: Chip) -> PackedTile:
    """Tile for ``groups`` times 8 rows of x and a weight of ``rows`` rows, twice as many where gated.

    A layer of Qwen3 8B at 1, 8, 16, 32 and 64 rows, one product after the other in a graph, where bfloat16 takes 100 to 107:
    four bits in groups of 128 took 40, 44, 52, 68 and 107 us, eight bits with a scale a row 50, 52, 69, 70 and 99.
    """
    records, total = -(-columns // DEPTH), -(-rows // BLOCK) * (2 if gated else 1)
    if groups == 1:
        tile = _of_few(records, total, layout, gated, chip)
    else:
        tile = _of_many(groups, records, total, layout, gated, chip)
    return _fitted(tile, groups, layout, chip)


def _of_few(records: int, total: int, layout: Layout, gated: bool, chip: Chip) -> PackedTile:
    """For up to 8 rows of x.

    Four bits are bound by instructions: warps read x themselves, and from three blocks on two share what is read. Eight bits
    are bound by memory: with x in the ring less of its latency is seen.
    """
    share = -(-total // chip.multiprocessors)
    if layout.format != INT4:
        row_warps, parts, stages = (1, 8, 3) if share <= 2 else (1, 4, 4) if share <= 3 else (4, 2, 3)
        tile = PackedTile(row_warps, parts, 1, 1, stages, 2)
    elif share <= 1:
        tile = PackedTile(1, 8, 1, 1, 5, 2, True)
    elif share <= 2:
        tile = PackedTile(2, 8, 1, 1, 4, 1, True)
    elif share <= 3:
        tile = PackedTile(1, 8, 2, 1, 3, 2, True)
    else:
        # Four scales a record take more registers than three programs leave, and on sm_100 and later one scale does.
        three = layout.sets != UNITS and int(chip.architecture.removeprefix("sm_")) < 100
        tile = PackedTile(2, 4, 2, 1, 3, 3 if three else 2, True)
    if gated and tile.rows % (2 * BLOCK):
        tile = replace(tile, row_warps=2, parts=4)
    parts = _parts(tile.parts, records)
    return replace(tile, parts=parts, stages=min(tile.stages, -(-records // parts) + 1))


def _of_many(groups: int, records: int, total: int, layout: Layout, gated: bool, chip: Chip) -> PackedTile:
    """Programs enough for one wave; where a tile would be small, clusters of two share K, and x is read for larger ones."""
    four = layout.format == INT4
    crowded = groups > 4 and layout.sets > 0
    warps = WARPS if groups > 2 and layout.sets == UNITS else MOST_WARPS
    share = -(-total // chip.multiprocessors)
    small = share < (3 if groups <= 4 and four else 6)
    if groups <= 4 and not four and share <= 2 and records < 64:
        small = False
    cluster = 2 if small and depends(chip.architecture) and records >= 8 else 1
    blocks = min(warps if crowded else MOST_BLOCKS, _even(-(-total * cluster // chip.multiprocessors), gated))
    each = 1 if blocks % 2 or (crowded and layout.sets == UNITS) or (groups > 4 and blocks == 2) else 2
    parts = _parts(warps // (blocks // each), records // cluster)
    if crowded and blocks // each * parts > WARPS:
        # Sums of two blocks, of groups and of all, do not fit into the registers that so many threads have.
        each, parts = 1, _parts(warps // blocks, records // cluster)
    direct = groups == 2 and each == 2 and (four or blocks > 4)
    stages = 2 if groups <= 4 and not direct else 3
    return PackedTile(blocks // each, parts, each, cluster, stages, 1, direct)


def _fitted(tile: PackedTile, groups: int, layout: Layout, chip: Chip) -> PackedTile:
    """The tile with as many of its stages, at least two, and of its parts as the shared memory holds."""
    for parts in (tile.parts, tile.parts // 2, 1):
        for room, most in ((min(SHARED_BYTES, chip.shared_bytes), tile.stages), (chip.shared_bytes, 2)):
            for stages in range(most, 1, -1):
                found = replace(tile, parts=max(1, parts), stages=stages)
                if PackedForm(layout, found, groups, 0, 0, False, False, False).shared_bytes <= room:
                    return found
    raise AssertionError(f"{tile} has no place in {chip}")


def _even(blocks: int, gated: bool) -> int:
    """Of a gate and an up projection a tile has as many."""
    return blocks + blocks % 2 if gated else blocks


def _parts(most: int, records: int) -> int:
    """The largest power of two of them that all have records."""
    return 1 << (max(1, min(most, records)).bit_length() - 1)
