"""``aiter.ops.activation``."""

from __future__ import annotations

import torch


def _gated(out, input, activate):
    gate, up = input.float().chunk(2, -1)
    out.copy_(activate(gate) * up)


def silu_and_mul(out, input):
    _gated(out, input, torch.nn.functional.silu)


def gelu_and_mul(out, input):
    _gated(out, input, torch.nn.functional.gelu)


def gelu_tanh_and_mul(out, input):
    _gated(out, input, lambda gate: torch.nn.functional.gelu(gate, approximate="tanh"))
