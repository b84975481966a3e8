"""Rows rounded to float8_e4m3fn (Micikevicius et al. 2022), each with scales of its own.

A scale is the largest size of what shares it, over 448, the largest number of the format: of a row, or of `WIDTH` inputs of
one, as DeepSeek-V3's report (2024, section 3.3.2) has them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_triton.kernels.codec import E4M3, narrowed
from vllm_triton.kernels.pdl import trigger, wait

WIDTH = tl.constexpr(128)
"""Inputs of a row of a program's tile, and those that share a scale where a row has several."""


@triton.jit
def round_rows(
    codes,
    scales,
    x,
    weight,
    eps,
    count,
    rows,
    x_row,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPED: tl.constexpr,
    NORM: tl.constexpr,
    FP8: tl.constexpr,
    PDL: tl.constexpr,
):
    """codes uint8 [rows, SIZE] and scales float32 of x [count, SIZE], of rms_norm(x) where `NORM`: a program a row.

    Scales are [rows], or of groups [SIZE / WIDTH, rows]. Rows from ``count`` on are of zeros. Those of x lie x_row elements
    apart; weight is float32 [SIZE], unread without `NORM`. What is not finite becomes NaN. `FP8`: the chip converts float8e4nv
    itself.
    """
    trigger(PDL)
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, BLOCK // WIDTH)
    columns = group[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    mask = columns < SIZE
    if NORM:
        w = tl.load(weight + columns, mask=mask, other=0.0)
    wait(PDL)
    there = columns < tl.where(row < count, SIZE, 0)
    value = tl.load(x + row * x_row + columns, mask=there, other=0.0).to(tl.float32)
    if NORM:
        mean = tl.sum(tl.sum(value * value, 1), 0) / SIZE
        value = (tl.rsqrt(mean + eps) * value) * w
    largest = tl.max(tl.abs(value), 1)
    if GROUPED:
        # Of zeros alone the scale is tiny, and the codes are zeros. Divided to the last bit: narrow numbers often lie just
        # between two codes.
        largest = tl.maximum(largest, 1e-30)
        tl.store(scales + group.to(tl.int64) * rows + row, tl.div_rn(largest, 448.0), mask=group * WIDTH < SIZE)
        inverse = tl.div_rn(448.0, largest)[:, None]
    else:
        whole = tl.maximum(tl.max(largest, 0), 1e-30)
        tl.store(scales + row, tl.div_rn(whole, 448.0))
        inverse = tl.div_rn(448.0, whole)
    value *= inverse
    if FP8:
        code = value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        code = tl.where(value == value, narrowed(value, E4M3), 0x7F).to(tl.uint8)
    tl.store(codes + row * SIZE + columns, code, mask=mask)
