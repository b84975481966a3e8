"""CDNA 2 (gfx90a): as CDNA 3, with half its matrix rate a unit and no fp8. Tiles of 64 keys spill under a window and a cap."""

from __future__ import annotations

from dataclasses import replace

from vllm_rocm.backends import cdna3
from vllm_triton.tuning import Extend

TUNING = replace(
    cdna3.TUNING,
    family="cdna2",
    extend=Extend(block_m=64, block_n=32, warps=4, stages=1, options=cdna3.MATRIX),
    extend_wide=Extend(block_m=64, block_n=32, warps=8, stages=1, options=cdna3.MATRIX),
)
