"""Ampere data centre chips (sm_80): 163 KiB of shared memory, no bulk copies, no dependent launch."""

from __future__ import annotations

from vllm_triton.portable import few_rows, one_row
from vllm_triton.tuning import Decode, Extend, Quantised, Tuning

TUNING = Tuning(
    family="ampere",
    extend=Extend(block_m=64, block_n=32, warps=4, stages=3),
    extend_wide=Extend(block_m=64, block_n=32, warps=4, stages=2),
    decode=Decode(block_n=64, warps=4, stages=3, waves=4),
    one_row=one_row,
    few_rows=few_rows,
    pdl=False,
    quantised=Quantised(64, 3),
)
