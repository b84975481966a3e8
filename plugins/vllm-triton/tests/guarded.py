"""Attention in Triton's interpreter, each tensor before a page that may not be touched: ``guarded.py CLASS...`` prints the
number of calls. A fault ends it: a process of its own."""

from __future__ import annotations

import ctypes
import mmap
import sys
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from vllm_core.api import OPS, load_entry
from vllm_core.ops.check import Provider
from vllm_core.ops.place import Placed, Placement
from vllm_triton import portable, tuning
from vllm_triton.offers import kv_layout, offers

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_kept: list[mmap.mmap] = []


def guarded(host: Tensor) -> Tensor:
    """A copy that ends at a page without access."""
    size = host.numel() * host.element_size()
    pages = -(-size // mmap.PAGESIZE)
    memory = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
    _kept.append(memory)
    begin = pages * mmap.PAGESIZE - size
    there = torch.frombuffer(memory, dtype=torch.uint8)
    assert _libc.mprotect(there.data_ptr() + pages * mmap.PAGESIZE, mmap.PAGESIZE, 0) == 0, ctypes.get_errno()
    return there[begin : begin + size].view(host.dtype).view(host.shape).copy_(host)


class Guarded(Placement):
    """Places each argument alone, without the padding that other checks need."""

    def _place(self, host: Tensor, *, output: bool, strided: bool) -> Placed:
        there = guarded(host) if prod(host.shape) else host
        return Placed(there, there, host, tuple(host.shape), False)


def main(classes: list[str]) -> None:
    # A tile of 32 keys: of several blocks where these are small.
    extend = replace(portable.TUNING.extend, block_m=16, block_n=32)
    tuning.use(replace(portable.TUNING, extend=extend), 1)
    ops = {name: load_entry(entry) for one in offers("check", ("any",)) for name, entry in one.ops.items()}
    provider, spec = Provider(ops, kv_layout), OPS["paged_attention"]
    for shape_class in classes:
        values = spec.load_generator()("float16", 0, shape_class)
        ops["paged_attention"](*Guarded(guarded).arguments(spec, values, provider.realize))
    print(len(classes))


if __name__ == "__main__":
    with torch.inference_mode():
        main(sys.argv[1:])
