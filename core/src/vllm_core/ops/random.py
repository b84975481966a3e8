"""Random numbers of requests: Philox4x32-10 (Salmon et al. 2011), counter (position, 0, 0, 0), key the seed's words.

A number depends on the seed and the position alone. Only the first output word is used, as ``word / 2**32``.
Test vector: seed 0, position 0 gives word 0x6627e8d5, the published first word for a zero counter and key.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 10
_MASK = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four words per element, from int64 tensors of words 0 .. 2**32 - 1.

    Products wrap modulo 2**64, which keeps all bits: an arithmetic shift and a mask read the high word exactly.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> 32) & _MASK ^ c1 ^ k0, p1 & _MASK, (p0 >> 32) & _MASK ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seed_low: Tensor, seed_high: Tensor, position: Tensor) -> Tensor:
    """float64 in [0, 1), a multiple of 2**-32, from integer tensors of one shape; words are taken as unsigned."""
    low, high, at = (word.long() & _MASK for word in (seed_low, seed_high, position))
    zero = torch.zeros_like(at)
    return philox((at, zero, zero, zero), (low, high))[0].double() * 2.0**-32
