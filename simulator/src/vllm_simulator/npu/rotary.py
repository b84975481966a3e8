"""Rotary position embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_simulator.npu.dispatch import op, queue, rule
from vllm_simulator.npu.norm import FLOATS


def _turned(x: Tensor, mode: str) -> Tensor:
    if mode == "half":
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


@op("npu::npu_rotary_mul")
def npu_rotary_mul(input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None) -> Tensor:
    """input * r1 + turned(input) * r2; four dimensions, r1 and r2 broadcast over heads."""
    rule(rotate is None, "a matrix `rotate` is not simulated")
    rule(rotary_mode in ("half", "interleave"), f"rotary_mode {rotary_mode!r}")
    rule(input.dim() == r1.dim() == r2.dim() == 4 and r1.shape == r2.shape, "four dimensions, r1 like r2")
    rule(input.dtype in FLOATS and input.dtype == r1.dtype == r2.dtype, f"dtypes {input.dtype}, {r1.dtype}, {r2.dtype}")
    size = input.shape[-1]
    rule(size < 896 and size % 2 == 0 and r1.shape[-1] == size, f"D below 896, even, that of r1: {size}, {r1.shape[-1]}")
    rule(input.shape[0] < 1000 and input.shape[2] < 1000, f"B and N below 1000: {tuple(input.shape)}")
    if rotary_mode == "interleave":
        rule(input.shape[0] * input.shape[2] < 1000, f"B * N below 1000: {tuple(input.shape)}")
        rule(r1.shape[0] == 1 and r1.shape[2] == 1, f"interleave takes r1 as 1S1D, not {tuple(r1.shape)}")
    rule(r1.shape[1] == input.shape[1] and r1.shape[2] in (1, input.shape[2]), "r1 fits the input in BSND")
    out = torch.empty_like(input, memory_format=torch.contiguous_format)

    def body(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        wide = x.float()
        out.copy_(wide * cos.float() + _turned(wide, rotary_mode) * sin.float())

    queue("npu::npu_rotary_mul", body, out, input, r1, r2)
    return out


@op("npu::npu_apply_rotary_pos_emb")
def npu_apply_rotary_pos_emb(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, layout: str = "BSND", rotary_mode: str = "half"
) -> tuple[Tensor, Tensor]:
    """Query and key in one call; D 64 or 128 on Atlas A2 and A3, cos and sin with one head."""
    rule(layout == "BSND", f"layout {layout!r} is not simulated")
    rule(query.shape[-1] in (64, 128) and cos.shape[2] == 1, f"D 64 or 128 and one head of cos: {tuple(query.shape)}")
    return npu_rotary_mul(query, cos, sin, rotary_mode), npu_rotary_mul(key, cos, sin, rotary_mode)
