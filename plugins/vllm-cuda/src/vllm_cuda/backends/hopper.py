"""Hopper (sm_90): 227 KiB of shared memory, bulk tensor copies, dependent launch. Sizes measured on an H200."""

from __future__ import annotations

from vllm_cuda.tiles import BAND, Tile, tile_within
from vllm_triton.portable import split_of
from vllm_triton.tuning import Decode, Extend, FewRows, Grouped, OneRow, Quantised, Tuning

AHEAD_BYTES = 512


def one_row(rows: int, columns: int) -> OneRow:
    """Within 5 % of the best of 16 at each shape of Qwen3 0.6B and 8B."""
    if columns > 1024:
        return OneRow(4, 2048, 8)
    return OneRow(4, 1024, 4) if rows <= 4096 else OneRow(4, 512, 4)


def few_rows(count: int, rows: int, columns: int, gated: bool) -> FewRows:
    """Within 5 % of the best of 30 at each shape of Qwen3 0.6B and 8B, for 64 rows.

    Fewer rows take the same tiles: those of 16 rows were slower in a chain of layers, by 10 % (8B) and 45 % (0.6B).
    """
    block_m = 64 if count <= 64 else 128
    if rows >= 65536:
        return FewRows(16 if count <= 16 else block_m, 64, 64, 4, 5, 1, 0)
    if rows < 2048 and columns % 512 == 0:
        block_k = 256 if block_m <= 64 else 128
        return FewRows(block_m, 16, block_k, 4, 4, split_of(rows, columns, 16, block_k), AHEAD_BYTES)
    block_n = 32 if gated and columns <= 2048 else 64
    return FewRows(block_m, block_n, 128, 4, 4, split_of(rows, columns, block_n, 128), AHEAD_BYTES)


def grouped(mean: int, rows: int, columns: int, gated: bool) -> Grouped:
    """Of few rows a long way of each weight row at a time, of many the largest tile whose sums fit into registers.

    Chosen from what the compiler reports; not measured on a chip.
    """
    if mean > 64:
        return Grouped(128, 128, 64, 8, 3)
    return Grouped(16 if mean <= 16 else 64, 64, 128, 4, 3)


PROGRAMS = 132
"""Multiprocessors of the chip that `streamed` was measured on: its programs are one wave there."""

CLUSTERS = {2: 66, 3: 39}
"""Clusters of so many programs that run there at once, one program a multiprocessor."""

WIDE_RINGS, NARROW_RINGS = 128 << 10, 96 << 10
"""Bytes of shared memory of a program. A multiprocessor has room for one of each: a product that follows another at once is
narrow, so that its weight is on the way while the other drains. It has none for two wide ones: the programs of a product
never share one while another is idle."""

LEAST_STAGES = 3
"""Of the weight in a ring: with fewer there is nothing on its way while one is multiplied and one has just come."""

MOST_ROWS = {1: 256, 2: 192, 3: 192}
"""Rows of the weight in a tile, by the programs of a cluster."""


def streamed(count: int, rows: int, columns: int, gated: bool, multiprocessors: int) -> Tile | None:
    """Tile of `vllm_cuda.few_rows` for a product; None where `few_rows` was measured to be as fast, or nothing was measured.

    The products of Qwen3 8B's layers, one after the other in a graph, took 110.9 us a layer for 64 rows, and 117.5 by
    `few_rows`; halves of them, for two ranks, 64.4 and 67.5. Smaller weights, and those of a vocabulary, were not faster; nor
    was one row, which is `one_row`'s: a step took 4.7 ms by this kernel, 4.3 by that.
    """
    bands = -(-count // BAND)
    if multiprocessors != PROGRAMS or rows >= 65536 or rows * columns < 12 << 20:
        return None
    if count < 2 or bands > (2 if gated else 1):
        return None
    if gated:
        cluster, wanted = 1, 16 * -(-rows // (PROGRAMS * 8))
    else:
        cluster, wanted = 2, 16 * -(-rows // (CLUSTERS[2] * 16))
        if wanted < 64:
            # Few rows of the weight in a tile: x would take as much of the way as the weight.
            cluster, wanted = 3, 24 * -(-rows // (CLUSTERS[3] * 24))
    if wanted > MOST_ROWS[cluster]:
        return None
    ring = NARROW_RINGS if columns > rows and not gated else WIDE_RINGS
    tile = tile_within(ring, wanted, cluster, bands, 4 if bands == 1 else 2)
    return tile if tile.stages >= LEAST_STAGES else None


TUNING = Tuning(
    family="hopper",
    extend=Extend(block_m=64, block_n=64, warps=4, stages=2),
    extend_wide=Extend(block_m=64, block_n=64, warps=4, stages=2),
    decode=Decode(block_n=64, warps=2, stages=3, waves=4),
    one_row=one_row,
    few_rows=few_rows,
    grouped=grouped,
    pdl=True,
    fp8=True,
    quantised=Quantised(128, 4),
)
