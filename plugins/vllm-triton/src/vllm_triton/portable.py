"""Block sizes that fit anywhere: 48 KiB of shared memory, no dependent launch. Families start from these."""

from __future__ import annotations

from vllm_triton.tuning import Decode, Extend, FewRows, Grouped, OneRow, Tuning


def one_row(rows: int, columns: int) -> OneRow:
    """A few rows a program; long rows in wide pieces."""
    return OneRow(4, 1024, 4) if columns <= 1024 else OneRow(4, 2048, 8)


def few_rows(count: int, rows: int, columns: int, gated: bool) -> FewRows:
    """Narrow tiles where the weight has few rows, and K split until the chip is full."""
    narrow = rows < 4096
    block_n = 32 if narrow else 64
    return FewRows(16 if count <= 16 else 64, block_n, 64, 4, 3, split_of(rows, columns, block_n, 64), 0)


def split_of(rows: int, columns: int, block_n: int, block_k: int, *, programs: int = 96, part: int = 1024) -> int:
    """Parts of K: doubled up to so many ``programs`` while each keeps ``part`` columns, as far as whole tiles go."""
    split, tiles = 1, -(-rows // block_n)
    while tiles * split < programs and columns >= 2 * part * split and columns % (2 * split * block_k) == 0:
        split *= 2
    return split


def grouped(mean: int, rows: int, columns: int, gated: bool) -> Grouped:
    """Tiles of as many rows as an expert has, up to 64; of a gate and an up projection two stages fit."""
    return Grouped(16 if mean <= 16 else 32 if mean <= 32 else 64, 64, 64, 4, 2 if gated else 3)


TUNING = Tuning(
    family="portable",
    extend=Extend(block_m=32, block_n=32, warps=4, stages=2),
    extend_wide=Extend(block_m=16, block_n=32, warps=4, stages=2),
    decode=Decode(block_n=32, warps=4, stages=2, waves=4),
    one_row=one_row,
    few_rows=few_rows,
    grouped=grouped,
    pdl=False,
)
