"""A loaded transformers model onto a device: linear layers on the op `linear`, everything else adopted as it is.

Of the linear layers that workers share each keeps its part; the model's own code goes by the widths that it meets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from vllm_core.api import Device
from vllm_core.layers.shard import COLUMNS
from vllm_core.models.transformers_track.parts import Parts

if TYPE_CHECKING:
    from vllm_core.engine.binding import BoundOps


class Linear(nn.Module):
    """x [..., K] -> [..., N] by the op `linear`, on weights packed by its provider; ``total`` sums it over the workers."""

    def __init__(
        self,
        call: Callable[..., Any],
        packed: Any,
        in_features: int,
        out_features: int,
        total: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self._call, self.packed, self._total = call, packed, total

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply. The result is a new tensor: transformers keeps several of one shape at a time."""
        rows = x.flatten(0, -2).contiguous()
        out = rows.new_empty((rows.shape[0], self.out_features))
        self._call(out, rows, self.packed)
        if self._total is not None:
            self._total(out)
        return out.view(*x.shape[:-1], self.out_features)


def rewire(model: nn.Module, device: Device, ops: BoundOps, dtype: torch.dtype, parts: Parts) -> None:
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
    total = _total(ops, parts)
    linears = [(name, m) for name, m in model.named_modules() if type(m) in (nn.Linear, Conv1D) and m.weight.dtype == dtype]
    for name, module in linears:
        if parts.dim(name) is not None:
            assert isinstance(module, nn.Linear), "transformers plans no Conv1D"
            mine, added = _part(name, module, device, parts)
            summed = total if parts.dim(name) == COLUMNS else None
            model.set_submodule(name, Linear(call, pack(mine, added, [name]), mine.shape[1], mine.shape[0], summed))
            continue
        key = (id(module.weight), id(module.bias))
        if key not in packs:
            bias = None if module.bias is None else adopt(module.bias)
            weight = adopt(module.weight) if isinstance(module, nn.Linear) else device.adopt("weights", _transposed(module))
            packs[key] = pack(weight, bias, readers[id(module.weight)])
        rows, columns = module.weight.shape if isinstance(module, nn.Linear) else module.weight.shape[::-1]
        model.set_submodule(name, Linear(call, packs[key], columns, rows))
    for path, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            part = parts.of_parameter(f"{path}.{name}", parameter)
            there = adopt(parameter) if part is None else device.adopt("weights", part)
            setattr(module, name, nn.Parameter(there, requires_grad=False))
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(module, name, adopt(buffer))


def _total(ops: BoundOps, parts: Parts) -> Callable[[torch.Tensor], None] | None:
    if parts.shard.workers == 1:
        return None
    reduce, group = ops.get("all_reduce", "comm"), parts.shard.group
    return lambda out: reduce(out, group)


def _part(name: str, module: nn.Linear, device: Device, parts: Parts) -> tuple[torch.Tensor, torch.Tensor | None]:
    """This worker's part of a layer, on the device; where outputs are summed, the first worker alone adds the bias."""
    cut = parts.cut(name, *module.weight.shape)
    assert cut is not None, "the layer is shared"
    weight, bias = device.adopt("weights", cut.take(module.weight.detach())), None
    if module.bias is not None and (cut.dim != COLUMNS or parts.shard.is_first):
        whole = module.bias.detach()
        bias = device.adopt("weights", whole if cut.dim == COLUMNS else cut.take(whole))
    return weight, bias


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
