"""Products with quantised weights in Triton's interpreter against the decoded weight: ``quantised.py FORMAT...`` prints what
differs. A process of its own, since the interpreter is chosen when Triton is imported."""

from __future__ import annotations

import sys
from dataclasses import replace

import torch
from gguf import GGMLQuantizationType
from gguf.quants import quantize

from vllm_core.api import OPS, QuantTensor
from vllm_core.ops.quant import dequantize
from vllm_triton import portable, tuning
from vllm_triton.ops import linear, quant
from vllm_triton.tuning import Quantised


def weight_of(name: str, rows: int, columns: int, g: torch.Generator) -> QuantTensor:
    """A random weight whose numbers are about columns ** -0.5."""
    shape, size = (rows, columns), columns**-0.5
    values = torch.randn(shape, generator=g) * size
    if name.startswith("q"):
        kind = GGMLQuantizationType[name.upper()]
        return QuantTensor(name, shape, torch.from_numpy(quantize(values.numpy(), kind)))
    kind, _, group = name.partition("/")
    if kind == "int4_group":
        groups = columns // int(group)
        data = torch.randint(0, 256, (rows, columns // 2), generator=g).to(torch.uint8)
        zero = torch.randint(5, 11, (rows, groups), generator=g).to(torch.uint8)
        return QuantTensor(kind, shape, data, torch.rand(rows, groups, generator=g).half() * size / 8, zero)
    if kind == "int8_channel":
        data = torch.randint(-127, 128, shape, generator=g).to(torch.int8)
        return QuantTensor(kind, shape, data, torch.rand(rows, generator=g) * size / 64)
    sizes = {"fp8_tensor": (1,), "fp8_channel": (rows,), "fp8_block128": (-(-rows // 128), -(-columns // 128))}
    data = (torch.randn(shape, generator=g) * 20).to(torch.float8_e4m3fn)
    return QuantTensor(kind, shape, data, (torch.rand(sizes[kind], generator=g) + 0.5) * size / 20)


def problems(name: str, count: int, rows: int, columns: int, dtype: torch.dtype) -> list[str]:
    g = torch.Generator().manual_seed(count)
    weight = weight_of(name, 2 * rows, columns, g)
    bias = torch.randn(2 * rows, generator=g).to(dtype) if count % 2 else None
    x = torch.randn(count, columns, generator=g).to(dtype)
    packed = quant.pack(weight, bias, on="linear_pack")
    plain = OPS["linear_pack"].load_reference()(dequantize(weight), None if bias is None else bias.float(), ())
    found, expected = [], []
    for op, width in (("linear", 2 * rows), ("linear_add", 2 * rows), ("gated_linear", rows)):
        out = torch.randn(count, width, generator=g).to(dtype)
        ours, theirs = out.clone(), out.float()
        scratch = torch.empty(count, 2 * rows)
        extra = {
            "linear": ((), ()),
            "linear_add": ((scratch.to(dtype),), ()),
            "gated_linear": ((scratch.to(dtype),), ("silu",)),
        }
        before, after = extra[op]
        getattr(linear, op)(ours, *before, x, packed, *after)
        before = tuple(one.float() for one in before)
        OPS[op].load_reference()(theirs, *before, x.float(), plain, *after)
        found.append(ours.float())
        expected.append(theirs)
    found.append(quant.widened(packed, torch.float32))
    expected.append(dequantize(weight))
    limits = (1e-5, 1e-4) if dtype == torch.float32 else (4e-3, 8e-3)
    wrong = [not torch.allclose(a, b, *limits) for a, b in zip(found, expected, strict=True)]
    return [f"{name} {count}x{rows}x{columns} result {i}" for i, bad in enumerate(wrong) if bad]


SIZES = ((1, 40, 256), (5, 24, 512), (2, 8, 4096))
OWN = Quantised(block_m=32, stages=1, block_n=16, warps=2, programs=64, part=128, unit=32)
RAGGED = (3, 20, 200)
"""Inputs that are no multiple of a step; of groups there are whole ones alone."""

if __name__ == "__main__":
    tuning.use(portable.TUNING, 4)
    cases = [(name, *size) for name in sys.argv[1:] for size in SIZES]
    cases += [(name, *RAGGED) for name in sys.argv[1:] if name.startswith(("fp8", "int8"))]
    wrong = [line for case in cases for line in problems(*case, torch.float32)]
    # A gate of float32 is not fused, and many of its rows are multiplied with the widened weight.
    halves = [case for case in cases if case[1] == SIZES[1][0]]
    wrong += [line for case in halves for line in problems(*case, torch.float16)]
    many = [(name, 20, 40, 256) for name in sys.argv[1:]]
    wrong += [line for case in many for line in problems(*case, torch.float32)]
    cases += halves + many
    # In a family's own tiles, steps and parts.
    tuning.use(replace(portable.TUNING, quantised=OWN), 4)
    own = [(sys.argv[1], *size) for size in SIZES]
    wrong += [line for case in own for line in problems(*case, torch.float16)]
    cases += own
    for line in wrong:
        print(line)
    print(f"{len(cases)} cases, {len(wrong)} differences")
