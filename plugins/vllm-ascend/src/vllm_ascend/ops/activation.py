"""Gated activations: `npu_swiglu`, `npu_geglu`."""

from __future__ import annotations

import torch_npu
from torch import Tensor

from vllm_core.api import UnsupportedError

GELU = {"gelu": 0, "gelu_tanh": 1}
"""`approximate` of npu_geglu."""


def gated_activation(out: Tensor, x: Tensor, kind: str) -> None:
    """``out[T,I] = f(x[:, :I]) * x[:, I:]``. Raises UnsupportedError for another kind."""
    out.copy_(activated(x, kind))


def activated(x: Tensor, kind: str) -> Tensor:
    """f(x[:, :I]) * x[:, I:] of x [T,2I], as the vendor returns it. Raises UnsupportedError for another kind."""
    if kind == "silu":
        result: Tensor = torch_npu.npu_swiglu(x, -1)
    elif kind in GELU:
        result = torch_npu.npu_geglu(x, -1, GELU[kind], True)[0]
    else:
        raise UnsupportedError(
            "Unknown activation", on=kind, found="no such kind", expected="silu, gelu or gelu_tanh", fix="use one of these"
        )
    return result
