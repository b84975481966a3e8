"""Matrix products with weights in fp8 whose inputs are rounded to fp8 too, in the tensor cores' own format, by cuBLASLt.

A token has one scale, or, where the weight has one a square of 128 x 128, one of each 128 inputs. Few rows, weights of other
formats, and those that the library does not take go the way of `vllm_cuda.packed_linear`, and are exact. A weight is kept as
that reads it: what cuBLASLt reads is made of it for each product, which takes as long as reading and writing it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor

from vllm_core.api import QuantTensor, Weight
from vllm_cuda import chip, packed_linear
from vllm_cuda import linear as plain
from vllm_cuda.backends.fp8 import few, results, takes
from vllm_cuda.fp8_codes import whole
from vllm_cuda.packed import Packed as Exact
from vllm_triton.ops.elementwise import add, gated_activation
from vllm_triton.ops.fp8_rows import rounded, rounded_norm


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight [N,K] as exact products read it; float32 scales [1,N] or, where `grouped`, [K / 128, N / 128], whose first
    dimension is contiguous."""

    exact: Exact
    scale: Tensor
    grouped: bool


AnyPacked = Packed | Exact | plain.Packed


def linear_pack(weight: Weight, bias: Tensor | None, readers: Sequence[str]) -> AnyPacked:
    """As `vllm_cuda.packed_linear.linear_pack`, but that of a weight in fp8 the inputs may be rounded."""
    exact = packed_linear.linear_pack(weight, bias, readers)
    if not (isinstance(weight, QuantTensor) and isinstance(exact, Exact)):
        return exact
    if not takes(weight.format, *weight.shape, chip.active().architecture):
        return exact
    assert weight.scale is not None, "fp8 has scales beside its codes"
    grouped = weight.format == "fp8_block128"
    return Packed(exact, weight.scale.float().contiguous().t() if grouped else exact.row_scale.view(1, -1), grouped)


def linear(out: Tensor, x: Tensor, weight: AnyPacked) -> None:
    """``out = x @ weight.T + bias``; a float32 out of narrower x is not rounded in between."""
    if _rounds(weight, x, out):
        _multiply(out, *rounded(x, grouped=weight.grouped), weight)
    else:
        packed_linear.linear(out, x, _exact(weight))


def linear_add(residual: Tensor, delta: Tensor, x: Tensor, weight: AnyPacked) -> None:
    """``residual += x @ weight.T + bias``; ``delta`` is scratch."""
    if _rounds(weight, x, residual):
        add(residual, residual, _product(delta, *rounded(x, grouped=weight.grouped), weight))
    else:
        packed_linear.linear_add(residual, delta, x, _exact(weight))


def rms_norm_linear(out: Tensor, normed: Tensor, x: Tensor, norm: Tensor, eps: float, weight: AnyPacked) -> None:
    """``out = rms_norm(x) @ weight.T + bias``; ``normed`` is scratch."""
    if _rounds(weight, x, out):
        _multiply(out, *rounded_norm(x, norm, eps, grouped=weight.grouped), weight)
    else:
        packed_linear.rms_norm_linear(out, normed, x, norm, eps, _exact(weight))


def gated_linear(out: Tensor, wide: Tensor, x: Tensor, weight: AnyPacked, kind: str) -> None:
    """``out = f(gate) * up`` with [gate, up] = x @ weight.T + bias; ``wide`` is scratch."""
    if _rounds(weight, x, out):
        gated_activation(out, _product(wide, *rounded(x, grouped=weight.grouped), weight), kind)
    else:
        packed_linear.gated_linear(out, wide, x, _exact(weight), kind)


def rms_norm_gated_linear(
    out: Tensor, wide: Tensor, normed: Tensor, x: Tensor, norm: Tensor, eps: float, weight: AnyPacked, kind: str
) -> None:
    """``out = f(gate) * up`` with [gate, up] = rms_norm(x) @ weight.T + bias; ``wide`` and ``normed`` are scratch."""
    if _rounds(weight, x, out):
        gated_activation(out, _product(wide, *rounded_norm(x, norm, eps, grouped=weight.grouped), weight), kind)
    else:
        packed_linear.rms_norm_gated_linear(out, wide, normed, x, norm, eps, _exact(weight), kind)


def _rounds(weight: AnyPacked, x: Tensor, out: Tensor) -> TypeGuard[Packed]:
    """Whether inputs are rounded for this product."""
    dtype, architecture = str(out.dtype).removeprefix("torch."), chip.active().architecture
    return isinstance(weight, Packed) and x.shape[0] > few(architecture) and results(dtype, architecture)


def _exact(weight: AnyPacked) -> Exact | plain.Packed:
    return weight.exact if isinstance(weight, Packed) else weight


def _multiply(out: Tensor, codes: Tensor, scales: Tensor, weight: Packed) -> None:
    """The product with the bias into ``out``, whatever rows codes are filled up by."""
    found = _product(out, codes, scales, weight)
    if found is not out:
        out.copy_(found)


def _product(into: Tensor, codes: Tensor, scales: Tensor, weight: Packed) -> Tensor:
    """The product with the bias [T,N], in ``into`` [T,N] unless codes have more rows."""
    filled = len(codes) != len(into)
    found = into.new_empty(len(codes), into.shape[1]) if filled else into
    transposed = whole(weight.exact, chip.active().architecture).t()
    torch._scaled_mm(codes, transposed, scales, weight.scale, out_dtype=into.dtype, out=found)
    if weight.exact.bias is not None:
        found.add_(weight.exact.bias)
    return found[: len(into)] if filled else found
