"""RDNA 4 (gfx1201): as RDNA 3, with WMMA of twice the rate, operands held once, and OCP fp8."""

from __future__ import annotations

from dataclasses import replace

from vllm_rocm.backends import rdna3
from vllm_triton.tuning import Codes, Decode, Extend, Quantised

TUNING = replace(
    rdna3.TUNING,
    family="rdna4",
    extend=Extend(block_m=64, block_n=32, warps=4, stages=1),
    extend_wide=Extend(block_m=32, block_n=16, warps=4, stages=1),
    decode=Decode(block_n=32, warps=4, stages=1, waves=4),
    quantised=Quantised(block_m=32, stages=2),
    codes=Codes(
        extend=Extend(block_m=64, block_n=16, warps=8, stages=1),
        extend_wide=Extend(block_m=32, block_n=16, warps=8, stages=1),
        decode=Decode(block_n=32, warps=4, stages=1, waves=4),
        decode_wide=Decode(block_n=16, warps=4, stages=1, waves=4),
    ),
)
