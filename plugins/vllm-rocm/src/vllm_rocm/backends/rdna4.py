"""RDNA 4 (gfx1201): as RDNA 3, with WMMA of twice the rate, operands held once, and OCP fp8."""

from __future__ import annotations

from dataclasses import replace

from vllm_rocm.backends import rdna3
from vllm_triton.tuning import Extend

TUNING = replace(
    rdna3.TUNING,
    family="rdna4",
    extend=Extend(block_m=64, block_n=32, warps=4, stages=1),
    extend_wide=Extend(block_m=32, block_n=32, warps=4, stages=1),
)
