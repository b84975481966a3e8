"""CDNA 4 (gfx950): 160 KiB of LDS, so that tiles are loaded two stages ahead; MFMA twice as deep, which makes `kpack` moot."""

from __future__ import annotations

from dataclasses import replace

from vllm_rocm.backends import cdna3
from vllm_triton.tuning import Codes, Decode, Extend, FewRows, Grouped

FREE = (("matrix_instr_nonkdim", 16),)
MATRIX = (*FREE, ("waves_per_eu", 2))


def few_rows(count: int, rows: int, columns: int, gated: bool) -> FewRows:
    """As on CDNA 3, with three stages of every tile."""
    return replace(cdna3.few_rows(count, rows, columns, gated), stages=3, options=MATRIX)


def grouped(mean: int, rows: int, columns: int, gated: bool) -> Grouped:
    """As on CDNA 3, with three stages of every tile."""
    return replace(cdna3.grouped(mean, rows, columns, gated), stages=3, options=MATRIX)


TUNING = replace(
    cdna3.TUNING,
    family="cdna4",
    extend=Extend(block_m=128, block_n=64, warps=8, stages=2, options=MATRIX),
    extend_wide=Extend(block_m=64, block_n=32, warps=4, stages=1, options=MATRIX),
    decode=Decode(block_n=64, warps=2, stages=2, waves=4, options=FREE),
    few_rows=few_rows,
    grouped=grouped,
    codes=Codes(
        extend=Extend(block_m=128, block_n=32, warps=8, stages=2, options=MATRIX),
        extend_wide=Extend(block_m=64, block_n=16, warps=8, stages=2, options=MATRIX),
        decode=Decode(block_n=32, warps=4, stages=2, waves=4, options=MATRIX),
        decode_wide=Decode(block_n=16, warps=4, stages=2, waves=4, options=MATRIX),
    ),
)
