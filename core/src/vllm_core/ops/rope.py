"""Reference: rotary position embedding (Su et al. 2021)."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_embedding(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool) -> None:
    """Rotate the first ``2 * cos_sin.shape[2]`` elements of each head of q and k in place."""
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(2).unbind(1)
    for x in (q, k):
        _rotate(x[..., : 2 * cos.shape[-1]], cos, sin, interleaved)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
    half = cos.shape[-1]
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    a, b = first.float(), second.float()
    rotated = torch.sub(a * cos, b * sin), torch.add(b * cos, a * sin)
    first.copy_(rotated[0])
    second.copy_(rotated[1])
