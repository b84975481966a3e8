"""Philox4x32-10 on numpy or Python integers: the same numbers as `vllm_core.ops.random`, without torch's overhead."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_MASK = 0xFFFFFFFF
_FEW = 8
"""Up to here Python's own integers are faster than arrays."""


def first_word(low: Any, high: Any, position: Any) -> Any:
    """First output word for counter (position, 0, 0, 0): of ints, or of uint64 arrays holding 32-bit words."""
    c0, c1, c2, c3 = position, 0, 0, 0
    k0, k1 = low, high
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0


def uniform(
    low: npt.NDArray[np.int32], high: npt.NDArray[np.int32], position: npt.NDArray[np.int32]
) -> npt.NDArray[np.float64]:
    """float64 in [0, 1) per element."""
    words = [array.view(np.uint32) for array in (low, high, position)]
    if len(position) <= _FEW:
        found = [first_word(*one) for one in zip(*(array.tolist() for array in words), strict=True)]
        return np.array(found, dtype=np.float64) * 2.0**-32
    result: npt.NDArray[np.float64] = first_word(*(array.astype(np.uint64) for array in words)) * 2.0**-32
    return result
