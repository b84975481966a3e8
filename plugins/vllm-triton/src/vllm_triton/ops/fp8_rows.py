"""Rows rounded to fp8 for products whose weights are fp8 too."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_triton.kernels import fp8_rows
from vllm_triton.ops.launch import filled, power_of_2
from vllm_triton.tuning import active

WIDTH: int = fp8_rows.WIDTH.value
"""Inputs that share a scale where a row has several."""


def rounded(x: Tensor, *, grouped: bool) -> tuple[Tensor, Tensor]:
    """Codes float8_e4m3fn [T,K] and scales float32 of x [T,K], K a multiple of 16.

    Scales are [T,1]; or, of each `WIDTH` inputs, [T', K / WIDTH], of which the first dimension is contiguous, and T' and the
    codes' rows are T filled up to a multiple of 4 by rows of zeros: libraries read scales by pieces of 16 bytes.
    """
    return _rounded(x, x, 0.0, grouped, norm=False)


def rounded_norm(x: Tensor, weight: Tensor, eps: float, *, grouped: bool) -> tuple[Tensor, Tensor]:
    """`rounded` of ``rms_norm(x)``, which is not rounded in between."""
    return _rounded(x, weight, eps, grouped, norm=True)


def _rounded(x: Tensor, weight: Tensor, eps: float, grouped: bool, *, norm: bool) -> tuple[Tensor, Tensor]:
    count, size = x.shape
    rows = filled(count) if grouped else count
    groups = -(-size // WIDTH) if grouped else 1
    codes = torch.empty((rows, size), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((groups, rows), dtype=torch.float32, device=x.device)
    if rows:
        block = max(WIDTH, power_of_2(size))
        fp8_rows.round_rows[(rows,)](
            codes.view(torch.uint8),
            scales,
            x,
            weight,
            eps,
            count,
            rows,
            x.stride(0),
            SIZE=size,
            BLOCK=block,
            GROUPED=grouped,
            NORM=norm,
            FP8=active().fp8,
            num_warps=max(1, min(16, block // 512)),
            **active().dependent,
        )
    return codes, scales.t() if grouped else scales.view(rows, 1)
