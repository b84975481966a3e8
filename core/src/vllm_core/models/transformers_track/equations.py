"""What forms are tried with: references, and comparisons of what they make with what was seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from vllm_core.models.transformers_track.findings import NormForm
from vllm_core.ops.norm import rms_norm

LINEAR = (nn.Linear, Conv1D)


def within(path: str, roots: Sequence[str]) -> bool:
    """Whether a module is one of ``roots``, or in one."""
    return any(path == root or path.startswith(f"{root}.") for root in roots)


def matrix(module: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight [N, K] and bias [N] of a linear layer; GPT-2's `Conv1D` stores [K, N]."""
    weight: torch.Tensor = module.weight.detach() if isinstance(module, nn.Linear) else module.weight.detach().T
    return weight, None if module.bias is None else module.bias.detach()


def normed(x: torch.Tensor, weight: torch.Tensor, offset: float, eps: float) -> torch.Tensor:
    """`rms_norm` by the reference."""
    out = torch.empty_like(x)
    rms_norm(out, x, weight.detach().float() + offset, eps)
    return out


def apply_norm(model: Any, norm: NormForm, x: torch.Tensor) -> torch.Tensor:
    """What a recognised norm of the model makes of x."""
    module = model.get_submodule(norm.path)
    return normed(x, module.weight, norm.offset, getattr(module, norm.eps))


def one_eps(model: Any, norms: Sequence[NormForm]) -> bool:
    """Fused ops have one epsilon for all their norms."""
    return len({getattr(model.get_submodule(one.path), one.eps) for one in norms}) <= 1


def has_no_more(model: Any, path: str, parts: Sequence[str], own: str = "") -> bool:
    """Whether a module's parameters are those of ``parts``, and its ``own``: others may do something that so short a run does
    not show."""
    known = {id(parameter) for part in parts for parameter in model.get_submodule(part).parameters()}
    known |= {id(model.get_submodule(path).get_parameter(own))} if own else set()
    return all(id(parameter) in known for parameter in model.get_submodule(path).parameters())
