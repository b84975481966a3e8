"""Block sizes that fit anywhere: 48 KiB of shared memory, no dependent launch. Families start from these."""

from __future__ import annotations

from vllm_triton.tuning import Decode, Extend, FewRows, OneRow, Tuning


def one_row(rows: int, columns: int) -> OneRow:
    """A few rows a program; long rows in wide pieces."""
    return OneRow(4, 1024, 4) if columns <= 1024 else OneRow(4, 2048, 8)


def few_rows(count: int, rows: int, columns: int, gated: bool) -> FewRows:
    """Narrow tiles where the weight has few rows, and K split until the chip is full."""
    narrow = rows < 4096
    block_n = 32 if narrow else 64
    return FewRows(16 if count <= 16 else 64, block_n, 64, 4, 3, split_of(rows, columns, block_n, 64), 0)


def split_of(rows: int, columns: int, block_n: int, block_k: int) -> int:
    """Parts of K: doubled while tiles are few and each part keeps 1,024 columns, as far as whole tiles go."""
    split, tiles = 1, -(-rows // block_n)
    while tiles * split < 96 and columns >= 2048 * split and columns % (2 * split * block_k) == 0:
        split *= 2
    return split


TUNING = Tuning(
    family="portable",
    extend=Extend(block_m=32, block_n=32, warps=4, stages=2),
    extend_wide=Extend(block_m=16, block_n=32, warps=4, stages=2),
    decode=Decode(block_n=32, warps=4, stages=2, waves=4),
    one_row=one_row,
    few_rows=few_rows,
    pdl=False,
)
