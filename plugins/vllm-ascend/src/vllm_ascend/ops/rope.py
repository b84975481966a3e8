"""Rotary embedding: `npu_rotary_mul`, on tables of cosines and sines as wide as what is rotated."""

from __future__ import annotations

import torch
import torch_npu
from torch import Tensor

MODES = {False: "half", True: "interleave"}


def rotary_embedding(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool) -> None:
    """Rotate the first R elements of each head of q [T,Hq,D] and k [T,Hk,D] in place; cos_sin is float32 [P,2,R/2]."""
    if not len(positions):
        return
    # Widened after the rows are chosen: few of the table's are needed, and a captured step reads the table as it is then.
    rows = _widened(cos_sin.index_select(0, positions), interleaved)
    # [T, 2, R] -> cosines and sines [1, T, 1, R], which the vendor calls 1S1D.
    cos, sin = (part.contiguous()[None, :, None] for part in rows.unbind(1))
    for x in (q, k):
        part = x[..., : cos.shape[-1]]
        # In float32: cosines rounded to bfloat16 turn by another angle, by more than the op's tolerance.
        wide = part.float().contiguous()[None]
        part.copy_(torch_npu.npu_rotary_mul(wide, cos, sin, MODES[interleaved])[0])


def _widened(cos_sin: Tensor, interleaved: bool) -> Tensor:
    """Each value twice, where its two elements are: float32 [T, 2, R]."""
    return cos_sin.repeat_interleave(2, -1) if interleaved else torch.cat((cos_sin, cos_sin), -1)
