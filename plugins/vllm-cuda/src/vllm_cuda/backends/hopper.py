"""Hopper (sm_90): 227 KiB of shared memory, bulk tensor copies, dependent launch. Sizes measured on an H200."""

from __future__ import annotations

from vllm_cuda.many_tiles import CLUSTER, DEPTH, LINES, ManyTile
from vllm_cuda.tiles import GROUP_ROWS, MOST_TOKENS, Tile, given_bytes, stage_bytes
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

CLUSTERS = {1: 132, 2: 66, 4: 16}
"""Clusters of so many programs that run there at once, one program a multiprocessor; of 4 as many as were measured to."""

SHARED_BYTES = 227 << 10
"""Of a program: those of a product that follows another begin where one has ended. Two programs on a multiprocessor, with half
of it each, were slower: the ones that come get uneven places."""

MOST_STAGES, LEAST_STAGES = 16, 3

LEAST_PROGRAMS, ENOUGH_PROGRAMS = 64, 96
"""The fewest that were measured; and so many of a large weight that they bring all that memory gives."""

SMALL, LARGE = 2 << 20, 12 << 20
"""Elements of a weight (of a gate, of a half) from which on this kernel is the faster one; and from which on it reads memory
for longer than programs wait for one another."""

MOST_SHORT = 128
"""Rows of x for tiles in whose last group rows of the weight are missing: they cost the matrix units as much as others."""

MOST_WHOLE = 224
"""Rows of x in a tile of a large weight that two programs share: more come out of the L2 cache too slowly."""


def streamed(count: int, rows: int, columns: int, gated: bool, multiprocessors: int) -> Tile | None:
    """Tile of `vllm_cuda.few_rows` for a product; None where another was measured to be as fast, or nothing was measured.

    Measured on the products of a layer, one after the other in a graph, by this kernel and without it (Triton's up to 64 rows
    and cuBLAS), in microseconds; reading the weights takes 90 of 8B and 7.3 of 0.6B. Qwen3 8B, 2 to 32 rows: 96, 110; 64: 98,
    113; 96: 103, 124; 128: 108, 126; 160: 117, 138; 192: 127, 146; 224: 145, 180; 256: 163, 174. Beyond 192 rows the chip's
    power decides, and figures differ by 10 %. Half of each of its products (two ranks), 64 rows: 54, 67; 192: 70, 89; 256: 92,
    88. Qwen3 0.6B, 16 rows: 15.4, 20.5; 64: 16.9, 21.4; 128: 20.4, 31.1; 224: 28.2, 30.3. Qwen3 1.7B, 64 rows: 35, 46; 192:
    50, 48; 224: 57, 57. Qwen3 14B without its gates, 64 rows: 79, 108; 128: 94, 95; 192: 115, 109; 256: 125, 124.
    One row is `one_row`'s.
    """
    if multiprocessors != PROGRAMS or rows >= 65536 or rows * columns < SMALL:
        return None
    large = rows * columns >= LARGE
    if not 2 <= count <= (MOST_TOKENS if large else MOST_WHOLE):
        return None
    lines = rows * (2 if gated else 1)
    if count > MOST_WHOLE:
        return _wide(count, lines, gated)
    found = [tile for groups in ((3, 2) if gated and large else (1, 2)) if (tile := _tile(count, lines, groups * GROUP_ROWS))]
    tile = max(found, key=lambda tile: (-(-lines // tile.rows) * tile.parts, -tile.groups), default=None)
    if tile is None or (programs := -(-lines // tile.rows) * tile.parts) < LEAST_PROGRAMS:
        return None
    if programs >= ENOUGH_PROGRAMS or not large or lines <= CLUSTERS[2] * GROUP_ROWS:
        return tile
    # As many rows to a tile as leave none of two programs for each idle.
    return _tile(count, lines, 16 * -(-lines // (CLUSTERS[2] * 16))) if count <= MOST_SHORT and not gated else None


def _wide(count: int, lines: int, gated: bool) -> Tile | None:
    """The tile for the most rows of x: of a gate, and where two programs share one. For others cuBLAS is as fast."""
    tile = _tile(count, lines, (3 if gated else 1) * GROUP_ROWS)
    if tile is None or tile.parts != (1 if gated else 2):
        return None
    # Twice as tall and half as wide.
    return tile if gated else _tile(-(-count // 2), lines, 2 * GROUP_ROWS, 2)


def _tile(count: int, lines: int, rows: int, parts: int = 0) -> Tile | None:
    """That of so many rows, each tile shared by ``parts`` programs, or as many as find room; None where not even one does."""
    tiles = -(-lines // rows)
    parts = parts or max((parts for parts, most in CLUSTERS.items() if tiles <= most), default=0)
    if not parts:
        return None
    # A slice of each program that shares a tile is of whole groups of eight rows.
    step = max(16, 8 * parts)
    tokens = step * -(-count // step)
    stages = min(MOST_STAGES, (SHARED_BYTES - given_bytes(rows, tokens, parts)) // stage_bytes(rows, tokens))
    # Three groups are never ahead of what comes.
    return Tile(rows, tokens, parts, stages, late=rows <= 2 * GROUP_ROWS) if stages >= LEAST_STAGES else None


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
    if not (gated or biased) or multiprocessors != PROGRAMS or count <= MOST_TOKENS:
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
