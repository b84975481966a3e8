"""A loaded transformers model onto a device: linear layers on the op `linear`, everything else adopted as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from vllm_core.api import Device

if TYPE_CHECKING:
    from vllm_core.engine.binding import BoundOps


class Linear(nn.Module):
    """x [..., K] -> [..., N] by the op `linear`, on weights packed by its provider."""

    def __init__(self, call: Callable[..., Any], packed: Any, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self._call, self._packed = call, packed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply. The result is a new tensor: transformers keeps several of one shape at a time."""
        rows = x.flatten(0, -2).contiguous()
        out = rows.new_empty((rows.shape[0], self.out_features))
        self._call(out, rows, self._packed)
        return out.view(*x.shape[:-1], self.out_features)


def rewire(model: nn.Module, device: Device, ops: BoundOps, dtype: torch.dtype) -> None:
    """Move ``model`` to ``device``, its linear layers of ``dtype`` replaced by `Linear`.

    A weight that several modules read is adopted and packed once, with the names of all its readers.
    """
    readers = _readers(model)
    adopted: dict[int, torch.Tensor] = {}
    packs: dict[tuple[int, int], Any] = {}

    def adopt(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in adopted:
            adopted[id(tensor)] = device.adopt("weights", tensor.detach())
        return adopted[id(tensor)]

    pack, call = ops.get("linear_pack", "linear"), ops.get("linear", "linear")
    linears = [(name, m) for name, m in model.named_modules() if type(m) in (nn.Linear, Conv1D) and m.weight.dtype == dtype]
    for name, module in linears:
        key = (id(module.weight), id(module.bias))
        if key not in packs:
            bias = None if module.bias is None else adopt(module.bias)
            weight = adopt(module.weight) if isinstance(module, nn.Linear) else device.adopt("weights", _transposed(module))
            packs[key] = pack(weight, bias, readers[id(module.weight)])
        rows, columns = module.weight.shape if isinstance(module, nn.Linear) else module.weight.shape[::-1]
        model.set_submodule(name, Linear(call, packs[key], columns, rows))
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(module, name, nn.Parameter(adopt(parameter), requires_grad=False))
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(module, name, adopt(buffer))


def _transposed(module: nn.Module) -> torch.Tensor:
    """GPT-2's `Conv1D` is a linear layer that stores [K, N]."""
    weight: torch.Tensor = module.weight.detach()  # type: ignore[operator]
    return weight.T.contiguous()


def _readers(model: nn.Module) -> dict[int, list[str]]:
    """Names of the modules that hold each parameter."""
    found: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            found.setdefault(id(parameter), []).append(name)
    return found
