"""Norms, one program a row; statistics in float32."""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_triton.kernels.pdl import trigger, wait


@triton.jit
def rms_norm(
    out,
    x,
    weight,
    eps,
    inner,
    out_outer,
    out_inner,
    x_outer,
    x_inner,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rows [outer, inner, SIZE] with strides in elements; the last dimension is contiguous."""
    trigger(PDL)
    row = tl.program_id(0).to(tl.int64)
    outer, middle = row // inner, row % inner
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    w = tl.load(weight + columns, mask=mask, other=0.0)
    wait(PDL)
    value = tl.load(x + outer * x_outer + middle * x_inner + columns, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
    result = (scale * value) * w
    tl.store(out + outer * out_outer + middle * out_inner + columns, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def add_rms_norm(out, residual, x, weight, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """residual += x, rounded to its dtype; out is the norm of the rounded sum. All [T, SIZE], contiguous."""
    trigger(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    at = row * SIZE + columns
    w = tl.load(weight + columns, mask=mask, other=0.0)
    wait(PDL)
    added = tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    added += tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    rounded = added.to(residual.dtype.element_ty)
    tl.store(residual + at, rounded, mask=mask)
    value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
    tl.store(out + at, ((scale * value) * w).to(out.dtype.element_ty), mask=mask)


@triton.jit
def layer_norm(out, x, weight, bias, eps, out_row, x_row, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """(x - mean) / sqrt(variance + eps) * weight + bias of rows [T, SIZE] that lie out_row and x_row elements apart."""
    trigger(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    w = tl.load(weight + columns, mask=mask, other=0.0)
    b = tl.load(bias + columns, mask=mask, other=0.0)
    wait(PDL)
    value = tl.load(x + row * x_row + columns, mask=mask, other=0.0).to(tl.float32)
    value = tl.where(mask, value - tl.sum(value, 0) / SIZE, 0.0)
    scale = tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
    tl.store(out + row * out_row + columns, (value * scale * w + b).to(out.dtype.element_ty), mask=mask)
