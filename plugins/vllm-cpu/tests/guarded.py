"""Runs every native op over random shapes with each tensor before a page that may not be touched: a child of
test_native_guard.py, which a fault ends. Prints the number of calls.

    python guarded.py [OP ...]
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from vllm_core.api import OPS, QuantTensor, load_entry
from vllm_core.ops import batch_inputs, check, inputs, quant
from vllm_core.ops.place import Placed, Placement, poison
from vllm_cpu import native_kv
from vllm_cpu.backends import generic
from vllm_cpu.backends import native as native_offers

PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_mapped: list[tuple[int, int]] = []
READ_WRITE, PRIVATE_ANONYMOUS = 3, 0x22


def guarded(host: Tensor, *, at_the_front: bool = False) -> Tensor:
    """A copy that ends at a page without access, or begins behind one."""
    size = host.numel() * host.element_size()
    pages = -(-size // PAGE) or 1
    base = _libc.mmap(None, (pages + 2) * PAGE, READ_WRITE, PRIVATE_ANONYMOUS, -1, 0)
    assert base != ctypes.c_void_p(-1).value, ctypes.get_errno()
    _mapped.append((base, (pages + 2) * PAGE))
    for guard in (base, base + (pages + 1) * PAGE):
        assert _libc.mprotect(guard, PAGE, 0) == 0
    if not size:
        return host.clone()
    begin = base + PAGE if at_the_front else base + (pages + 1) * PAGE - size
    memory = (ctypes.c_byte * size).from_address(begin)
    tensor = torch.frombuffer(memory, dtype=torch.uint8).view(host.dtype).view(host.shape)
    tensor.copy_(host)
    return tensor


def release() -> None:
    """Give back all pages."""
    while _mapped:
        _libc.munmap(*_mapped.pop())


@dataclass(slots=True)
class Guarded(Placement):
    """Places each argument alone, without the padding that other checks need."""

    front: bool = False

    def _place(self, host: Tensor, *, output: bool, strided: bool) -> Placed:
        there = guarded(poison(torch.empty_like(host)) if output else host, at_the_front=self.front)
        return Placed(there, there, host, tuple(host.shape), False)


def run(op: str, provider: check.Provider, dtype: str, seed: int, shape_class: str, *, front: bool) -> None:
    """One call."""
    spec = OPS[op]
    generated: list[Any] = list(spec.load_generator()(dtype, seed, shape_class))
    placement = Guarded(front=front)
    placement.copy = lambda host: guarded(host, at_the_front=front)
    provider.ops[op](*placement.arguments(spec, generated, provider.realize))
    release()


PACKED = {"q4_0": 32, "q4_1": 32, "q5_0": 32, "q5_1": 32, "q8_0": 32, "int4_group": 64, "int8_channel": 7}
K_QUANTS = {"q4_k": 144, "q5_k": 176, "q6_k": 210}
"""Bytes of a block of 256."""


def weights() -> Iterator[Tensor | QuantTensor]:
    """One of each format, with rows that are no whole tiles, and no whole vectors where the format allows it."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        yield from (torch.randn(n, k).to(dtype) for n, k in ((3, 5), (19, 77)))
    for name, step in PACKED.items():
        yield from (quant.quantize(torch.randn(n, k), name) for n, k in ((3, step), (21, 5 * step)))
    for name, size in K_QUANTS.items():
        for n, blocks in ((3, 1), (21, 3)):
            raw = torch.randint(0, 256, (n, blocks * size), dtype=torch.uint8) & 0x3B
            yield QuantTensor(name, (n, blocks * 256), raw)


def products(front: bool) -> int:
    """Products and embeddings of every format, few rows and many, exact and rounded."""
    from vllm_cpu.ops import native_linear as ops

    def place(host: Tensor) -> Tensor:
        return guarded(host, at_the_front=front)

    calls = 0
    for weight in weights():
        there = quant.moved(weight, place)
        n, k = weight.shape
        for rows, pack in product((1, 4, 9), (ops.linear_pack, ops.linear_pack_int8)):
            packed = pack(there, place(torch.randn(n)), ["a"])
            for dtype in (torch.float32, torch.bfloat16):
                out, x, norm = (place(torch.randn(shape).to(dtype)) for shape in ((rows, n), (rows, k), (k,)))
                ops.linear(out, x, packed)
                ops.rms_norm_linear(out, x, x, norm, 1e-6, packed)
                ops.linear_add(out, out, x, packed)
                calls += 3
        ids = place(torch.tensor([0, n - 1]))
        ops.embedding(place(torch.zeros(2, k)), ids, there, 1.0)
        calls += 1
        release()
    return calls


def main(only: list[str]) -> None:
    """All ops, or those named."""
    ops = {name: load_entry(entry) for offer in generic.offers() for name, entry in offer.ops.items()}
    mine = {name: load_entry(entry) for offer in native_offers.offers() for name, entry in offer.ops.items()}
    provider = check.Provider(ops | mine, native_kv.kv_layout)
    calls = products(front=False) + products(front=True) if not only or "linear" in only else 0
    sizes = ("", "/q5/k5/d20/b3/h77", "/q3/k1/d33/b5/h129", "/q2/k2/d8/b16/h8", "/q8/k2/d40/b8/h1000")
    for op in only or sorted(mine):
        if op in check.PRIVATE or op == "linear":
            continue
        kinds = ("", "/kv_int8", "/kv_fp8") if op.startswith(("kv_", "paged")) else ("",)
        batch = inputs.SHAPE_CLASSES[op] in (batch_inputs.STEP_CLASSES, batch_inputs.TAIL_CLASSES)
        for number, shape_class in enumerate(inputs.SHAPE_CLASSES[op]):
            for size in sizes[: 1 if batch or shape_class == "long" else None]:
                for kind in kinds:
                    dtype = ("float32", "bfloat16", "float16")[(number + calls) % 3]
                    for front in (False, True):
                        run(op, provider, dtype, calls, f"{shape_class}{size}{kind}", front=front)
                        calls += 1
    print(calls)


if __name__ == "__main__":
    main(sys.argv[1:])
