"""Memory in large pages, for weights: a decode step reads all of them, and looking up where a small page lies takes a core as
long as reading much of it, in a virtual machine above all. A core's own guesses of what is read next end with a page, too.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable

import torch

PAGE_BYTES = 2 << 20
BLOCK_BYTES = 32 * PAGE_BYTES
"""What is asked of the system at a time; it gives a page when that is first touched."""

ALIGNMENT = 64


class Pages:
    """Tensors one after the other, in the order in which they come. Memory goes with the last tensor of its block.

    ``available`` says how many bytes there are.
    """

    def __init__(self, available: Callable[[], int]) -> None:
        self._available = available
        self._rest = torch.empty(0, dtype=torch.uint8)

    def place(self, host: torch.Tensor) -> torch.Tensor | None:
        """Return a contiguous copy; None where there is no memory for it, or no large pages."""
        size = host.numel() * host.element_size()
        if size > len(self._rest):
            block = _block(-(-size // PAGE_BYTES) * PAGE_BYTES) if size <= self._available() else None
            if block is None:
                return None
            self._rest = block
        flat = self._rest[:size]
        self._rest = self._rest[-(-size // ALIGNMENT) * ALIGNMENT :]
        # By one thread: the others' wake-ups take longer than what they would copy.
        host = host.contiguous()
        ctypes.memmove(flat.data_ptr(), host.data_ptr(), size)
        return flat.view(host.dtype).view(host.shape)


def _block(size: int) -> torch.Tensor | None:
    """Zeros, of at least this size, that begin where a large page may."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    size = max(size, BLOCK_BYTES)
    memory = mmap.mmap(-1, size + PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without them
        return None
    block = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -block.data_ptr() % PAGE_BYTES
    return block[begin : begin + size]
