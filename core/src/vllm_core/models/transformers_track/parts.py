"""Which linear layers of a transformers model several workers share: as transformers' own plan for the class says.

A plan names layers by their path below the base model, with ``*`` for an index: ``colwise`` keeps rows of the weight,
``rowwise`` keeps columns and sums the outputs. A block (attention, MLP) whose plan asks for more than these two is computed
whole by every worker.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from vllm_core.layers.shard import COLUMNS, ROWS, Cut, Shard

_DIMS = {"colwise": ROWS, "rowwise": COLUMNS}
_ATTENTION = re.compile(r"(.*\.)?(self_attn|self_attention|attention|attn)\.[^.]+")


def shared_layers(config: Any) -> tuple[tuple[str, int], ...]:
    """Paths of the layers that are shared, and the dimension along which their weights are cut."""
    blocks: dict[str, dict[str, str]] = {}
    for path, style in (getattr(config, "base_model_tp_plan", None) or {}).items():
        if not style.startswith("replicated"):
            blocks.setdefault(path.rpartition(".")[0], {})[path] = style
    whole = [block for block in blocks.values() if set(block.values()) == set(_DIMS)]
    return tuple((path, _DIMS[style]) for block in whole for path, style in block.items())


def shares_attention(layers: tuple[tuple[str, int], ...]) -> bool:
    """Whether heads can be given to several workers."""
    return any(_ATTENTION.fullmatch(path) for path, _ in layers)


@dataclass(frozen=True, slots=True)
class Parts:
    """What one worker keeps. `prefix` leads to the base model; `layers` are those of `shared_layers`."""

    shard: Shard
    prefix: str
    layers: tuple[tuple[str, int], ...]

    def dim(self, name: str) -> int | None:
        """The dimension along which the weight of the layer ``name`` is cut; None where all of it is kept."""
        if self.shard.workers == 1 or not name.startswith(self.prefix):
            return None
        path = name.removeprefix(self.prefix)
        found = (dim for pattern, dim in self.layers if re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), path))
        return next(found, None)

    def of_parameter(self, name: str, parameter: torch.Tensor) -> torch.Tensor | None:
        """The worker's part of a parameter that is no linear layer's, such as a number per head; None where it keeps all."""
        dim = self.dim(name)
        cut = None if dim is None else self.shard.part(parameter.shape[dim], dim)
        return None if cut is None else cut.take(parameter.detach())

    def cut(self, name: str, rows: int, columns: int) -> Cut | None:
        """The part of a weight [rows, columns]."""
        dim = self.dim(name)
        return None if dim is None else self.shard.part((rows, columns)[dim], dim)
