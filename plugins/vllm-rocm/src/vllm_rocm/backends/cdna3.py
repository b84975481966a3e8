"""CDNA 3 (gfx942): waves of 64, MFMA, 64 KiB of LDS, 512 vector registers of which accumulators may take half.

Sizes are chosen from what the compiler reports (registers, LDS, waves that fit), not measured on a chip. Two waves for
each SIMD hide memory behind products; MFMA of 16 rows fits the few queries of a decode step; pairs of K steps (`kpack`)
make LDS reads as wide as they go.
"""

from __future__ import annotations

from vllm_triton.portable import split_of
from vllm_triton.tuning import Codes, Decode, Extend, FewRows, Grouped, OneRow, Quantised, Tuning

SPLIT = {"programs": 256, "part": 512}
"""K is split until every compute unit has a program, each part of at least 512 columns."""

FREE = (("matrix_instr_nonkdim", 16), ("kpack", 2))
MATRIX = (*FREE, ("waves_per_eu", 2))
"""Two waves of a SIMD leave each 256 registers; `FREE` is for tiles that take more where heads are wide or many share a key."""


def one_row(rows: int, columns: int) -> OneRow:
    """4 KiB of each weight row at a time: a wave of 64 lanes loads 1 KiB at once."""
    return OneRow(4, 1024, 4) if columns <= 1024 else OneRow(4, 2048, 4)


def few_rows(count: int, rows: int, columns: int, gated: bool) -> FewRows:
    """Tiles of 16 or 64 rows of x; as many stages as 64 KiB of LDS hold."""
    block_m = 16 if count <= 16 else 64 if count <= 64 else 128
    block_n = 16 if rows < 4096 else 32 if rows < 16384 or gated else 64
    block_k = 128 if block_m <= 64 else 64
    stages = 3 if block_m <= 64 and block_n <= 32 and not gated else 2
    return FewRows(block_m, block_n, block_k, 4, stages, split_of(rows, columns, block_n, block_k, **SPLIT), 0, MATRIX)


def grouped(mean: int, rows: int, columns: int, gated: bool) -> Grouped:
    """Tiles of as many rows as an expert has, up to 128; sums of a gate and an up projection take half of the registers."""
    if mean > 64:
        return Grouped(128, 64 if gated else 128, 64, 8, 2, MATRIX)
    return Grouped(16 if mean <= 16 else 64, 64, 64, 4, 2, MATRIX)


TUNING = Tuning(
    family="cdna3",
    extend=Extend(block_m=128, block_n=32, warps=8, stages=1, options=MATRIX),
    extend_wide=Extend(block_m=64, block_n=32, warps=4, stages=1, options=MATRIX),
    decode=Decode(block_n=64, warps=2, stages=1, waves=4, options=FREE),
    one_row=one_row,
    few_rows=few_rows,
    grouped=grouped,
    pdl=False,
    quantised=Quantised(block_m=32, stages=1),
    codes=Codes(
        extend=Extend(block_m=64, block_n=32, warps=4, stages=1, options=MATRIX),
        extend_wide=Extend(block_m=64, block_n=16, warps=8, stages=1, options=MATRIX),
        decode=Decode(block_n=32, warps=4, stages=1, waves=4, options=MATRIX),
        decode_wide=Decode(block_n=16, warps=4, stages=1, waves=4, options=MATRIX),
    ),
)
