"""Xe-HPC (Data Center GPU Max, pvc): DPAS of 16 lanes, 128 KiB of shared local memory, block loads of two dimensions.

Sizes follow from what Intel's offline compiler says of the registers of a thread: 256 of 64 bytes in the large mode, which
halves the threads of a vector engine. Products spill nothing, attention the least that was found (`vllm_xpu.machine_code`).
They were not measured on a chip.
"""

from __future__ import annotations

from vllm_triton.portable import split_of
from vllm_triton.tuning import Decode, Extend, FewRows, Grouped, OneRow, Tuning

LARGE = (("grf_mode", "large"),)


def one_row(rows: int, columns: int) -> OneRow:
    """2 to 4 KiB of each weight row at a time; of gated rows both weights' do not fit into half of the registers."""
    return OneRow(4, 1024 if columns <= 1024 else 2048, 8, LARGE)


def few_rows(count: int, rows: int, columns: int, gated: bool) -> FewRows:
    """Tiles of 16 or 64 rows of x and 32 of the weight, eight sub-groups of 16 lanes."""
    return FewRows(16 if count <= 16 else 64, 32, 64, 8, 2, split_of(rows, columns, 32, 64), 0, LARGE)


def grouped(mean: int, rows: int, columns: int, gated: bool) -> Grouped:
    """Tiles of as many rows as an expert has, up to 64; sums of a gate and an up projection take twice the registers."""
    most = 32 if gated else 64
    return Grouped(16 if mean <= 16 else most, 32, 64, 8, 2, LARGE)


TUNING = Tuning(
    family="xe-hpc",
    extend=Extend(block_m=64, block_n=16, warps=16, stages=2, options=LARGE),
    extend_wide=Extend(block_m=32, block_n=16, warps=16, stages=2, options=LARGE),
    decode=Decode(block_n=16, warps=4, stages=2, waves=4, options=LARGE),
    one_row=one_row,
    few_rows=few_rows,
    grouped=grouped,
    pdl=False,
)
