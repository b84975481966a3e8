"""Hopper (sm_90): 227 KiB of shared memory, bulk tensor copies, dependent launch. Sizes measured on an H200."""

from __future__ import annotations

from vllm_cuda.many_tiles import CLUSTER, DEPTH, LINES, ManyTile
from vllm_cuda.tiles import BAND, Tile, tile_within
from vllm_triton.portable import split_of
from vllm_triton.tuning import Decode, Extend, FewRows, Grouped, OneRow, Quantised, Tuning

AHEAD_BYTES = 512


def one_row(rows: int, columns: int) -> OneRow:
    """Within 5 % of the best of 16 at each shape of Qwen3 0.6B and 8B."""
    if columns >= 4096:
        return OneRow(4, 1024, 4)
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
    """The best of about ten at each of four steps of Qwen3-30B-A3B, whose tokens take 8 of 128 experts.

    A layer's experts took 310 us of 64 tokens and 341 of 200, where reading the weights takes 276 and 281; 439 of 1,024, where
    tiles of 64 x 64 x 128 took 519; and 1,497 of 8,192, where the matrix units need 783.
    """
    if mean > 64:
        return Grouped(128, 128, 64, 8, 3)
    if mean > 16:
        return Grouped(64, 64, 64, 4, 4) if gated else Grouped(64, 128, 64, 8, 4)
    return Grouped(16, 64, 128, 4, 3)


PROGRAMS = 132
"""Multiprocessors of the chip that `streamed` was measured on: its programs are one wave there."""

CLUSTERS = {2: 66, 3: 39}
"""Clusters of so many programs that run there at once, one program a multiprocessor."""

WIDE_RINGS, NARROW_RINGS, WHOLE_RINGS = 128 << 10, 96 << 10, 210 << 10
"""Bytes of shared memory of a program. A multiprocessor has room for a wide and a narrow one: a product that follows another
at once is narrow, so that its weight is on the way while the other drains. It has none for two wide ones: the programs of a
product never share one while another is idle. Beyond 64 rows x takes most of it, and a program all that there is."""

X_STAGES = {1: 4, 2: 8, 3: 5, 4: 4}
GATED_X_STAGES = {1: 4, 2: 6, 3: 4, 4: 4}
SMALL_GATED_X_STAGES = 6
"""Of x in a ring, by bands of 64 rows: x comes out of the L2 cache, too late where few stages are on the way."""

LEAST_STAGES = 3
"""Of the weight in a ring: with fewer there is nothing on its way while one is multiplied and one has just come."""

MOST_ROWS = {1: 256, 2: 192, 3: 192}
"""Rows of the weight in a tile, by the programs of a cluster."""

MOST_ROWS_OF_BANDS = {1: 256, 2: 256, 3: 192, 4: 128}
"""The same by bands of 64 rows of x: threads of more bands have fewer registers for sums."""

SMALL, LARGE, LARGEST = 2 << 20, 12 << 20, 32 << 20
"""Elements of a weight from which on this kernel is the faster one, for some numbers of rows and for most; and to which it is
for the most rows, where it has more columns than rows."""


def streamed(count: int, rows: int, columns: int, gated: bool, multiprocessors: int) -> Tile | None:
    """Tile of `vllm_cuda.few_rows` for a product; None where another was measured to be as fast, or nothing was measured.

    Measured on the products of a layer, one after the other in a graph, by this kernel where it is taken and without it, in
    microseconds. Qwen3 8B, 64 rows: 109.9, 118.2; 96: 117.4, 127.4; 128: 119.6, 128.8; 160: 131.8, 140.2; 192: 145.4, 152.3;
    256: 165, 169.6. Half of each of its products (two ranks), 224 rows: 93.2, 95.9. Qwen3 0.6B, 96 rows: 29.9, 34.2; with the
    gate alone, 160: 32.2, 32.8; 224: 34.5, 35.5; 256: 35.3, 35.7. One row is `one_row`'s: a step took 4.7 ms by this kernel,
    4.2 by that.
    """
    bands = -(-count // BAND)
    if multiprocessors != PROGRAMS or rows >= 65536 or not _taken(count, rows, columns, gated):
        return None
    if gated or (rows * columns < LARGE and rows > columns):
        cluster, step = 1, 16 if gated else 8
        wanted = step * -(-rows // (PROGRAMS * 8))
    else:
        cluster, wanted = 2, 16 * -(-rows // (CLUSTERS[2] * 16))
        if wanted < 64 and rows * columns >= LARGE:
            # Few rows of the weight in a tile: x would take as much of the way as the weight.
            cluster, wanted = 3, 24 * -(-rows // (CLUSTERS[3] * 24))
    if wanted > MOST_ROWS[cluster]:
        return None
    if wanted > MOST_ROWS_OF_BANDS[bands]:
        # Half of it, twice: whole groups of 8 rows of the gate and of the up projection.
        wanted = 16 * -(-wanted // 32)
    narrow = columns > rows and not gated
    ring = WHOLE_RINGS if bands > 1 else NARROW_RINGS if narrow else WIDE_RINGS
    x_stages = (GATED_X_STAGES if gated else X_STAGES)[bands]
    if gated and bands > 1 and rows * columns < LARGE:
        x_stages = SMALL_GATED_X_STAGES
    if bands == 1 and rows > columns and not gated:
        x_stages = 6
    tile = tile_within(ring, wanted, cluster, bands, x_stages)
    return tile if tile.stages >= LEAST_STAGES else None


def _taken(count: int, rows: int, columns: int, gated: bool) -> bool:
    """Whether this kernel was the faster one. cuBLAS has tiles of 160 rows of x, which 161 do not fit into."""
    if not 2 <= count <= max(MOST_ROWS_OF_BANDS) * BAND:
        return False
    if rows * columns < LARGE:
        return count > 64 and (gated or count <= 128) and rows * columns >= SMALL
    if gated or count <= 128:
        return True
    if count <= 160:
        return columns <= rows
    return columns >= rows and (count <= 192 or (columns > rows and rows * columns <= LARGEST))


MANY_ROWS = 256
"""Rows of the weight in a tile of many rows of x."""

HELD = 16 << 20
"""Bytes of x that tiles go down before they go to the right: the next ones to the right find them in the L2 cache."""

MOST_SPARE, MOST_SPARE_OF_SMALL = 0.12, 0.28
"""Of the time of all programs, the part in which they have no rows, at most: cuBLAS has tiles for many shapes. Before a small
weight it has to read and write out once more in about as much time as the product takes."""


def many(count: int, rows: int, columns: int, gated: bool, biased: bool, multiprocessors: int) -> ManyTile | None:
    """Tile of `vllm_cuda.many_rows` for a product; None where cuBLAS was as fast, or nothing was measured.

    Where one kernel does, both are bound by the chip's power, and cuBLAS is up to 3 % the faster (figures differed by 2 %):
    this one is for what cuBLAS needs a second kernel for. Measured at steady power, in turns, cuBLAS's figure last, in
    microseconds. Gates of Qwen3 8B: 8,192 rows 2,455 and 2,591, 4,096: 1,272 and 1,330, 1,024: 317 and 340, 512: 162 and 174,
    and where much is spare 768: 257 and 256, 384: 165 and 131. Of Qwen3 0.6B: 8,192: 169 and 202, 4,096: 85 and 103, 2,048:
    42 and 54, 1,024: 25 and 26. With a bias, 8,192 rows: 6,144 x 4,096 632 and 747, 4,096 x 1,024 121 and 191, 4,096 x 4,096
    to a residual 427 and 512; and 1,024 rows by 4,608 x 3,584, where half is spare, 72 and 64. All products of a layer, one
    after the other in a graph: 8B, 8,192 rows 4,710 and 4,878, 5,000: 2,928 and 2,953, 1,000: 605 and 622, 512: 318 and 328;
    0.6B, 8,192 rows 425 and 452, 5,000: 267 and 282; Qwen2.5 7B, whose first product has a bias, 8,192 rows 5,657 and 6,105.
    """
    if not (gated or biased) or multiprocessors != PROGRAMS or count <= max(MOST_ROWS_OF_BANDS) * BAND:
        return None
    if columns % DEPTH or rows * columns < SMALL or rows >= 65536:
        return None
    weight_rows, clusters = rows * (2 if gated else 1), PROGRAMS // CLUSTER
    pairs = -(-count // (CLUSTER * LINES))
    waves = -(-pairs * -(-weight_rows // MANY_ROWS) // clusters)
    spare = 1 - count * weight_rows / (waves * clusters * CLUSTER * LINES * MANY_ROWS)
    if spare > (MOST_SPARE if rows * columns >= LARGE else MOST_SPARE_OF_SMALL):
        return None
    return ManyTile(MANY_ROWS, max(1, min(pairs, HELD // (CLUSTER * LINES * columns * 2))))


TUNING = Tuning(
    family="hopper",
    extend=Extend(block_m=64, block_n=64, warps=4, stages=3),
    extend_wide=Extend(block_m=64, block_n=64, warps=4, stages=2),
    decode=Decode(block_n=64, warps=2, stages=2, waves=4, stages_of_many=3),
    one_row=one_row,
    few_rows=few_rows,
    grouped=grouped,
    pdl=True,
    fp8=True,
    quantised=Quantised(128, 4),
)
