"""What launchers share: sizes, and memory that kernels keep between calls."""

from __future__ import annotations

import torch
from torch import Tensor


def power_of_2(size: int) -> int:
    """The next power of two."""
    return 1 << max(0, size - 1).bit_length()


def filled(count: int) -> int:
    """The next multiple of 4: numbers of 4 bytes or more that come after so many begin at a multiple of 16 bytes.

    Kernels are compiled once for pointers that do and once for those that do not; where all do, steps of every size share one.
    """
    return (count + 3) & ~3


class Scratch:
    """Memory of a fixed size per device, made once and never moved: captured steps keep its address."""

    def __init__(self, num_bytes: int, *, zero: bool = False) -> None:
        self._bytes = num_bytes
        self._make = torch.zeros if zero else torch.empty
        self._made: dict[torch.device, Tensor] = {}

    def get(self, device: torch.device) -> Tensor:
        """uint8 [num_bytes] on ``device``."""
        found = self._made.get(device)
        if found is None:
            found = self._made[device] = self._make(self._bytes, dtype=torch.uint8, device=device)
        return found
