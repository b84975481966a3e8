"""Kernels for the tests of a simulated device: Triton reads their source from this file."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scale_kernel(out, x, factor, count, BLOCK: tl.constexpr):  # noqa: N803
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + at, mask=at < count)
    tl.store(out + at, values * factor, mask=at < count)


@triton.jit
def product_kernel(out, a, b, SIZE: tl.constexpr):  # noqa: N803
    rows = tl.arange(0, SIZE)
    square = rows[:, None] * SIZE + rows[None, :]
    total = tl.dot(tl.load(a + square), tl.load(b + square))
    tl.store(out + square, (total + tl.sum(total, 1)[:, None]).to(out.dtype.element_ty))


@triton.jit
def sum_kernel(out, x, SIZE: tl.constexpr):  # noqa: N803
    tl.store(out, tl.sum(tl.load(x + tl.arange(0, SIZE)), 0))
