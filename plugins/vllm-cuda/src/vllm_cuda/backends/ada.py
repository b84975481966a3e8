"""Ada (sm_89): 99 KiB of shared memory."""

from __future__ import annotations

from vllm_triton.portable import grouped, one_row, split_of
from vllm_triton.tuning import Decode, Extend, FewRows, Quantised, Tuning


def few_rows(count: int, rows: int, columns: int, gated: bool) -> FewRows:
    """As on Ampere, in tiles of which two stages fit."""
    block_n = 32 if rows < 4096 or gated else 64
    return FewRows(16 if count <= 16 else 64, block_n, 64, 4, 3, split_of(rows, columns, block_n, 64), 0)


TUNING = Tuning(
    family="ada",
    extend=Extend(block_m=64, block_n=32, warps=4, stages=2),
    extend_wide=Extend(block_m=32, block_n=32, warps=4, stages=2),
    decode=Decode(block_n=64, warps=4, stages=2, waves=4),
    one_row=one_row,
    few_rows=few_rows,
    grouped=grouped,
    pdl=False,
    fp8=True,
    quantised=Quantised(64, 3),
)
