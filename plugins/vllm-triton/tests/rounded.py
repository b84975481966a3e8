"""Rows rounded to fp8 in Triton's interpreter against core's rounding: prints what differs. A process of its own, since the
interpreter is chosen when Triton is imported."""

from __future__ import annotations

import sys
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional

from vllm_core.ops.quant import rounded_to_fp8
from vllm_triton import portable, tuning
from vllm_triton.ops.fp8_rows import WIDTH, rounded, rounded_norm


def rows_of(count: int, size: int, dtype: torch.dtype) -> Tensor:
    """Rows of several sizes in a wider matrix: of zeros, of one large number, tiny ones."""
    x = torch.randn(count, size + 24, generator=torch.Generator().manual_seed(size))[:, 8 : 8 + size].to(dtype)
    x[0] *= 100
    x[1] *= 1e-3
    x[2] = 0
    x[3, size // 2] = 3000.0
    return x


def numbers(codes: Tensor, scales: Tensor, count: int, grouped: bool) -> Tensor:
    """What the first ``count`` rows stand for; the rest must be of zeros."""
    assert codes.dtype == torch.float8_e4m3fn
    assert codes[count:].float().count_nonzero() == 0
    each = scales.repeat_interleave(WIDTH, 1)[:, : codes.shape[1]] if grouped else scales
    return (codes.float() * each)[:count]


def problems(count: int, size: int, dtype: torch.dtype, grouped: bool) -> list[str]:
    x, group = rows_of(count, size, dtype), WIDTH if grouped else 0
    weight = torch.rand(size, generator=torch.Generator().manual_seed(1)) + 0.5
    plain, normed = rounded(x, grouped=grouped), rounded_norm(x, weight, 1e-6, grouped=grouped)
    found = []
    shape = (-(-count // 4) * 4, -(-size // WIDTH)) if grouped else (count, 1)
    if plain[1].shape != shape or (grouped and plain[1].stride(0) != 1):
        found.append(f"scales {tuple(plain[1].shape)}, strides {plain[1].stride()}")
    exact = functional.rms_norm(x.float(), (size,), weight, 1e-6)
    for name, (codes, scales), values, allowed in (("plain", plain, x.float(), 0.0), ("normed", normed, exact, 2e-3)):
        wanted = rounded_to_fp8(values, group)
        # Of a number between two codes the last bit decides.
        wrong = ~torch.isclose(numbers(codes, scales, count, grouped), wanted, rtol=1e-5, atol=1e-7 * float(values.abs().max()))
        if wrong.float().mean() > allowed + 1e-3:
            found.append(f"{name}: {int(wrong.sum())} of {wrong.numel()}")
    return found


def not_finite(value: float) -> list[str]:
    x = torch.ones(2, 256)
    x[1, 3] = value
    codes, scales = rounded(x, grouped=False)
    finite = (codes.float() * scales).isfinite()
    return [] if finite[0].all() and not finite[1, 3] else [f"{value}: {finite.sum().item()} finite"]


def main() -> None:
    tuning.use(portable.TUNING, 4)
    cases = [*product((5, 8), (512, 1024), (torch.float32, torch.float16), (False, True))]
    cases += [(6, size, torch.float16, False) for size in (16, 1040)]
    lines = [f"{case}: {line}" for case in cases for line in problems(*case)]
    lines += [line for value in (float("nan"), float("inf"), -float("inf")) for line in not_finite(value)]
    codes, scales = rounded(torch.ones(0, 64), grouped=True)
    lines += [] if codes.shape == (0, 64) and scales.shape == (0, 1) else ["no rows"]
    for line in lines:
        print(line)
    print(f"{len(cases) + 4} cases, {len(lines)} differences")
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
