"""Products whose inputs are rounded to fp8, in Triton's interpreter against core's references: prints what differs.

What stands for a GPU: the host's ``_scaled_mm``, where it has scales of rows; one of our own, as strict as Hopper's, where a
weight has them of squares; and codes that are put in order by indices. A process of its own, since the interpreter is chosen
when Triton is imported.
"""

from __future__ import annotations

import sys
from itertools import product

import torch
from torch import Tensor

from vllm_core.ops.check import Provider, Where, judge
from vllm_cuda import chip, fp8_linear
from vllm_cuda.packed import Packed
from vllm_triton import portable, tuning

OPS = ("linear_pack", "linear", "linear_add", "rms_norm_linear", "gated_linear", "rms_norm_gated_linear")
LONG = ("long/h512/fp8", "long/h544/fp8")
"""Classes with more rows than stay exact, and sizes of which one has no whole squares."""

ROWS = torch._scaled_mm
SQUARES: list[tuple[int, ...]] = []


def in_order(weight: Packed, architecture: str) -> Tensor:
    """As `fp8_codes.whole`, by the definition of the order in `vllm_cuda.packed`."""
    blocks, records = weight.codes.shape[:2]
    # [block, record, unit, g, t, half, word, low or high, pair]
    words = weight.codes.view(blocks, records, 4, 8, 4, 2, 2, 2, 2).int()
    low, high = words[..., 0], words[..., 1]
    first = (high & 0x80) | (high & 7) << 4 | low >> 4
    second = (high & 8) << 4 | (high & 0x70) | (low & 15)
    codes = torch.cat((first, second), dim=-1).to(torch.uint8)
    whole = codes.permute(0, 5, 3, 1, 2, 4, 6, 7).reshape(blocks * 16, records * 128)
    return whole[: weight.rows, : weight.columns].contiguous().view(torch.float8_e4m3fn)


def multiply(codes: Tensor, weight: Tensor, scales: Tensor, others: Tensor, *, out_dtype: torch.dtype, out: Tensor) -> Tensor:
    """``torch._scaled_mm``, of which the host has no scales of squares."""
    (count, size), rows = codes.shape, weight.shape[1]
    if scales.shape[1] == 1:
        return out.copy_(ROWS(codes, weight, scales, others, out_dtype=out_dtype))
    assert (scales.shape, scales.stride()) == ((count, size // 128), (1, count))
    assert (others.shape, others.stride()) == ((size // 128, rows // 128), (1, size // 128))
    assert count % 4 == 0
    assert out.shape == (count, rows)
    SQUARES.append((count, rows, size))
    x = codes.float() * scales.repeat_interleave(128, 1)
    y = weight.float() * others.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return out.copy_(x @ y)


def main() -> None:
    tuning.use(portable.TUNING, 4)
    chip.use(chip.Chip("sm_90", 132, 227 << 10))
    fp8_linear.whole, torch._scaled_mm = in_order, multiply
    provider = Provider({name: getattr(fp8_linear, name) for name in OPS}, None)
    lines, count = [], 0
    for op, shape, seed in product(OPS[1:], LONG, (0, 1, 2)):
        if seed == 2 and shape == LONG[1]:
            continue  # stays exact, by a kernel that no host has
        found = judge(op, provider, "float16", seed, shape, Where(strided=seed == 1)).problems
        lines += [f"{op} {shape} {seed}: {line}" for line in found]
        count += 1
    if len(SQUARES) != len(OPS) - 1:
        lines.append(f"{len(SQUARES)} products with squares")
    for line in lines:
        print(line)
    print(f"{count} cases, {len(lines)} differences")
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
