"""Ampere data centre chips (sm_80): 163 KiB of shared memory, no bulk copies, no dependent launch."""

from __future__ import annotations

from vllm_triton.portable import few_rows, one_row
from vllm_triton.tuning import Decode, Extend, Grouped, Quantised, Tuning


def grouped(mean: int, rows: int, columns: int, gated: bool) -> Grouped:
    """Tiles of as many rows as an expert has, up to 128; not measured on a chip."""
    if mean > 64:
        return Grouped(128, 64 if gated else 128, 64, 8, 3)
    return Grouped(16 if mean <= 16 else 64, 64, 64, 4, 4 if mean <= 16 else 3)


TUNING = Tuning(
    family="ampere",
    extend=Extend(block_m=64, block_n=32, warps=4, stages=3),
    extend_wide=Extend(block_m=64, block_n=32, warps=4, stages=2),
    decode=Decode(block_n=64, warps=4, stages=3, waves=4),
    one_row=one_row,
    few_rows=few_rows,
    grouped=grouped,
    pdl=False,
    quantised=Quantised(64, 3),
)
