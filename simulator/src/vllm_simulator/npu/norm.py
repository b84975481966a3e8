"""Norms and activations."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from vllm_simulator.npu.dispatch import op, queue, rule

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def _check_norm(x: Tensor, gamma: Tensor) -> None:
    rule(x.dtype in FLOATS, f"x is {x.dtype}")
    rule(gamma.dtype == x.dtype, f"gamma has x's dtype: {gamma.dtype} and {x.dtype}")
    rule(tuple(x.shape[-gamma.dim() :]) == tuple(gamma.shape), f"gamma {tuple(gamma.shape)} is not x's last dimensions")


def _normed(y: Tensor, rstd: Tensor, x: Tensor, gamma: Tensor, epsilon: float) -> None:
    wide = x.float()
    scale = (wide.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    rstd.copy_(scale)
    y.copy_(wide * scale * gamma.float())


@op("npu::npu_rms_norm")
def npu_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """x / rms(x) * gamma over gamma's dimensions (here: the last), and 1 / rms."""
    _check_norm(input, gamma)
    y, rstd = (
        torch.empty_like(input, memory_format=torch.contiguous_format),
        input.new_empty((*input.shape[:-1], 1), dtype=torch.float32),
    )
    queue("npu::npu_rms_norm", lambda y, rstd, x, gamma: _normed(y, rstd, x, gamma, epsilon), y, rstd, input, gamma)
    return y, rstd


@op("npu::npu_add_rms_norm")
def npu_add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    """The norm of x1 + x2, 1 / rms, and the sum."""
    _check_norm(x1, gamma)
    rule(x1.shape == x2.shape and x1.dtype == x2.dtype, "x1 and x2 have one shape and dtype")
    y, total = (torch.empty_like(x1, memory_format=torch.contiguous_format) for _ in range(2))
    rstd = x1.new_empty((*x1.shape[:-1], 1), dtype=torch.float32)

    def body(y: Tensor, rstd: Tensor, total: Tensor, x1: Tensor, x2: Tensor, gamma: Tensor) -> None:
        torch.add(x1, x2, out=total)
        _normed(y, rstd, total, gamma, epsilon)

    queue("npu::npu_add_rms_norm", body, y, rstd, total, x1, x2, gamma)
    return y, rstd, total


def _half(input: Tensor, dim: int) -> Tensor:
    rule(input.dtype in FLOATS and input.shape[dim] % 2 == 0, f"x is {input.dtype} {tuple(input.shape)}")
    shape = list(input.shape)
    shape[dim] //= 2
    return input.new_empty(shape)


@op("npu::npu_swiglu")
def npu_swiglu(input: Tensor, dim: int = -1) -> Tensor:
    """silu(a) * b of the halves a and b."""
    out = _half(input, dim)

    def body(out: Tensor, x: Tensor) -> None:
        gate, up = x.float().chunk(2, dim)
        out.copy_(functional.silu(gate) * up)

    queue("npu::npu_swiglu", body, out, input)
    return out


@op("npu::npu_geglu")
def npu_geglu(input: Tensor, dim: int = -1, approximate: int = 1, activate_left: bool = False) -> tuple[Tensor, Tensor]:
    """gelu of one half times the other, and that gelu; approximate 1 is the tanh form."""
    rule(approximate in (0, 1), f"approximate is {approximate}")
    out, active = _half(input, dim), _half(input, dim)

    def body(out: Tensor, active: Tensor, x: Tensor) -> None:
        left, right = x.float().chunk(2, dim)
        gate, other = (left, right) if activate_left else (right, left)
        wide = functional.gelu(gate, approximate="tanh" if approximate else "none")
        active.copy_(wide)
        out.copy_(wide * other)

    queue("npu::npu_geglu", body, out, active, input)
    return out, active
