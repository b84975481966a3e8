"""Embedding, gather, sums, activations plain and gated."""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_triton.kernels.pdl import trigger, wait

SILU = tl.constexpr(0)
GELU = tl.constexpr(1)
GELU_TANH = tl.constexpr(2)


@triton.jit
def gather_rows(out, x, rows, scale, SIZE: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr, PDL: tl.constexpr):
    """out[i] = x[rows[i]] (* scale), one program a row and a block of columns."""
    trigger(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    source = tl.load(rows + row).to(tl.int64)
    value = tl.load(x + source * SIZE + columns, mask=mask)
    if SCALED:
        value = (value.to(tl.float32) * scale).to(out.dtype.element_ty)
    tl.store(out + row * SIZE + columns, value, mask=mask)


@triton.jit
def gather_shard(out, ids, weight, first, count, scale, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out[i] = weight[ids[i] - first] * scale where the ``count`` rows of weight have it, else 0."""
    trigger(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    source = tl.load(ids + row).to(tl.int64) - first
    value = tl.zeros([BLOCK], tl.float32)
    if (source >= 0) & (source < count):
        value = tl.load(weight + source * SIZE + columns, mask=mask, other=0.0).to(tl.float32) * scale
    tl.store(out + row * SIZE + columns, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def add(out, a, b, out_row, a_row, b_row, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out [T, SIZE] = a + b; rows lie as many elements apart."""
    trigger(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    left = tl.load(a + row * a_row + columns, mask=mask, other=0.0).to(tl.float32)
    right = tl.load(b + row * b_row + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * out_row + columns, (left + right).to(out.dtype.element_ty), mask=mask)


@triton.jit
def activation(out, x, out_row, x_row, SIZE: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr):
    """out [T, SIZE] = f(x)."""
    trigger(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    value = tl.load(x + row * x_row + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * out_row + columns, activate(value, KIND).to(out.dtype.element_ty), mask=mask)


@triton.jit
def activate(gate, KIND: tl.constexpr):
    """silu, gelu, its tanh form, or relu, of float32."""
    if KIND == SILU:
        result = gate / (1.0 + tl.exp(-gate))
    elif KIND == GELU:
        result = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif KIND == GELU_TANH:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        result = gate / (1.0 + tl.exp(-2.0 * inner))
    else:
        result = tl.where(gate < 0.0, 0.0, gate)
    return result


@triton.jit
def gated_activation(out, x, SIZE: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr):
    """out [T, SIZE] = f(x[:, :SIZE]) * x[:, SIZE:]."""
    trigger(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    gate = tl.load(x + row * 2 * SIZE + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * SIZE + SIZE + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + columns, (activate(gate, KIND) * up).to(out.dtype.element_ty), mask=mask)
