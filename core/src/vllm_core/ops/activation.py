"""References: activations, plain and gated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional

from vllm_core.errors import UnsupportedError, nearest


def _gelu_tanh(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


_FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"silu": functional.silu, "gelu": functional.gelu, "gelu_tanh": _gelu_tanh, "relu": torch.relu}
)


def _function(kind: str) -> Callable[[Tensor], Tensor]:
    found = _FUNCTIONS.get(kind)
    if found is None:
        raise UnsupportedError(
            "Unknown activation", on=kind, found="no such kind", expected=", ".join(_FUNCTIONS), fix=nearest(kind, _FUNCTIONS)
        )
    return found


def gated_activation(out: Tensor, x: Tensor, kind: str) -> None:
    """``out[T,I] = f(x[:, :I]) * x[:, I:]``."""
    gate, up = x.float().chunk(2, dim=-1)
    out.copy_(_function(kind)(gate).mul_(up))


def activation(out: Tensor, x: Tensor, kind: str) -> None:
    """``out = f(x)``."""
    out.copy_(_function(kind)(x.float()))


def soft_cap(logits: Tensor, cap: float) -> None:
    """``logits[R,V] = cap * tanh(logits / cap)`` in place."""
    logits.div_(cap).tanh_().mul_(cap)
