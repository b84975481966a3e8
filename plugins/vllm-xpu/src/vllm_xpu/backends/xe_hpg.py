"""Xe-HPG (Arc Alchemist, dg2): DPAS of 8 lanes, 64 KiB of shared local memory, registers half as wide as on Xe-HPC.

Attention is in the tiles that fit into the registers with heads of up to 64, by Intel's offline compiler: with half as many
sub-groups or twice as many keys a decode step's spills 900 to 2,100 registers. Of products of few rows as many spill; products
are offered all the same, since the references are products too.
"""

from __future__ import annotations

from dataclasses import replace

from vllm_triton.portable import few_rows as narrow
from vllm_triton.portable import one_row
from vllm_triton.tuning import Decode, Extend, FewRows, Grouped
from vllm_xpu.backends import xe_hpc


def few_rows(count: int, rows: int, columns: int, gated: bool) -> FewRows:
    """The portable tiles with more sub-groups: registers hold half as much."""
    return replace(narrow(count, rows, columns, gated), warps=8, stages=2, options=xe_hpc.LARGE)


def grouped(mean: int, rows: int, columns: int, gated: bool) -> Grouped:
    """Tiles half as large as on Xe-HPC."""
    return Grouped(16 if mean <= 16 else 32, 64, 32, 8, 2, xe_hpc.LARGE)


EXTEND = Extend(block_m=16, block_n=16, warps=8, stages=1, options=xe_hpc.LARGE)

TUNING = replace(
    xe_hpc.TUNING,
    family="xe-hpg",
    extend=EXTEND,
    extend_wide=EXTEND,
    decode=Decode(block_n=16, warps=8, stages=1, waves=4, options=xe_hpc.LARGE),
    one_row=one_row,
    few_rows=few_rows,
    grouped=grouped,
)
