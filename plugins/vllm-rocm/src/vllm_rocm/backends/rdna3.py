"""RDNA 3 (gfx1100): waves of 32, WMMA of 16 x 16 x 16, 64 KiB of LDS a workgroup, 256 vector registers a lane.

Accumulators live in the same 256 registers as everything else, and both halves of a wave hold the operands of WMMA: tiles
of keys are 16 wide, and shared by eight waves.
"""

from __future__ import annotations

from vllm_triton.portable import split_of
from vllm_triton.tuning import Codes, Decode, Extend, FewRows, Grouped, OneRow, Quantised, Tuning


def one_row(rows: int, columns: int) -> OneRow:
    """2 KiB of each weight row at a time: a wave of 32 lanes loads 512 bytes at once."""
    return OneRow(4, 1024, 4)


def few_rows(count: int, rows: int, columns: int, gated: bool) -> FewRows:
    """Narrow tiles, which leave registers for the loads of the next one."""
    block_m = 16 if count <= 16 else 64
    return FewRows(block_m, 32, 64, 4, 2, split_of(rows, columns, 32, 64), 0)


def grouped(mean: int, rows: int, columns: int, gated: bool) -> Grouped:
    """Tiles of as many rows as an expert has, up to 64, shared by eight waves where they are large."""
    if mean > 16:
        return Grouped(64, 64, 32, 8, 2)
    return Grouped(16, 32, 64, 4, 2)


TUNING = Tuning(
    family="rdna3",
    extend=Extend(block_m=64, block_n=16, warps=8, stages=1),
    extend_wide=Extend(block_m=32, block_n=16, warps=8, stages=1),
    decode=Decode(block_n=32, warps=8, stages=1, waves=4),
    one_row=one_row,
    few_rows=few_rows,
    grouped=grouped,
    pdl=False,
    quantised=Quantised(block_m=32, stages=1),
    codes=Codes(
        extend=Extend(block_m=16, block_n=16, warps=8, stages=1),
        extend_wide=Extend(block_m=16, block_n=16, warps=8, stages=1),
        decode=Decode(block_n=16, warps=4, stages=1, waves=4),
        decode_wide=Decode(block_n=16, warps=4, stages=1, waves=4),
    ),
)
