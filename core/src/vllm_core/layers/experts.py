"""A layer's mixture of experts on bound ops: a router, the experts that it chooses, and where checkpoints keep them.

Workers that share a model all have the whole router and a part of every expert: they choose alike, because what they route is
the same bits, and their outputs are summed as those of a dense MLP are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from vllm_core.api import Device, QuantTensor, Weight
from vllm_core.layers.linear import BoundOps, PackedLinear, adopt, rounded_to
from vllm_core.layers.shard import COLUMNS, Cut, Shard
from vllm_core.layers.weights import WeightLoader
from vllm_core.models.spec import ExpertSpec, ModelSpec
from vllm_core.ops import quant

_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_MIXTRAL_NAME = re.compile(r"(.*)\.block_sparse_moe\.(?:experts\.(\d+)\.(w[123])|gate)\.weight")
_STACKED_NAME = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|gate_proj|up_proj|down_proj)(?:\.weight)?")


@dataclass(frozen=True, slots=True)
class RoutedViews:
    """What a step of T tokens needs beside the activations of a dense layer.

    logits [T, E] and weights [T, K] float32, experts int32 [T, K]; the rest is the scratch of `moe`.
    """

    logits: torch.Tensor
    experts: torch.Tensor
    weights: torch.Tensor
    wide: torch.Tensor
    narrow: torch.Tensor
    parts: torch.Tensor
    index: torch.Tensor


class RoutedBuffers:
    """The memory of `RoutedViews` at the largest step; ``spec`` is that of one worker."""

    def __init__(self, spec: ExpertSpec, hidden_size: int, device: Device, max_tokens: int, dtype: torch.dtype) -> None:
        def buffer(rows: int, width: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return device.allocate("workspace", (rows, width), dtype)

        self._spec, pairs = spec, max_tokens * spec.chosen
        self._logits = buffer(max_tokens, spec.count, torch.float32)
        self._weights = buffer(max_tokens, spec.chosen, torch.float32)
        self._experts = buffer(max_tokens, spec.chosen, torch.int32)
        self._wide, self._narrow = buffer(pairs, 2 * spec.intermediate_size), buffer(pairs, spec.intermediate_size)
        self._parts = buffer(pairs, hidden_size)
        self._index = device.allocate("workspace", (4 * (pairs + spec.count),), torch.int32)

    def views(self, count: int) -> RoutedViews:
        """The views of a step of ``count`` tokens."""
        pairs = count * self._spec.chosen
        return RoutedViews(
            logits=self._logits[:count],
            experts=self._experts[:count],
            weights=self._weights[:count],
            wide=self._wide[:pairs],
            narrow=self._narrow[:pairs],
            parts=self._parts[:pairs],
            index=self._index[: 4 * (pairs + self._spec.count)],
        )


class SparseMLP:
    """Router and experts of one layer."""

    def __init__(self, spec: ModelSpec, device: Device, ops: BoundOps, shard: Shard) -> None:
        assert spec.experts is not None, "the model has experts"
        self._device, self._shard, self._kind = device, shard, spec.activation
        self._renormalize = spec.experts.renormalize
        self._linear, self._route = ops.get("linear", "linear"), ops.get("moe_route", "mlp")
        self._pack, self._moe = ops.get("moe_pack", "moe"), ops.get("moe", "moe")
        self._formats = ops.formats("moe_pack", "moe")
        self._router = PackedLinear(device, ops)
        self._parts: dict[str, Weight] = {}
        self._count, self._readers = spec.experts.count, list[str]()
        self.packed: Any = None

    def expect(self, loader: WeightLoader, spec: ModelSpec, name: str, dtype: torch.dtype) -> None:
        """Register all weights; ``spec`` is that of the whole model, ``name`` ends with a dot."""
        assert spec.experts is not None, "the model has experts"
        hidden, inner, shard = spec.hidden_size, spec.experts.intermediate_size, self._shard
        self._router.expect(loader, {f"{name}gate": self._count}, hidden, dtype, bias=False, exact=True)
        each = [f"{name}experts.{index}." for index in range(self._count)]
        both = [f"{one}{half}_proj" for one in each for half in ("gate", "up")]
        down = [f"{one}down_proj" for one in each]
        self._readers = [*both, *down]
        self._register(loader, "gate_up", both, (inner, hidden), dtype, shard.part(inner))
        self._register(loader, "down", down, (hidden, inner), dtype, shard.part(inner, COLUMNS))

    def run(self, out: torch.Tensor, hidden: torch.Tensor, x: RoutedViews | None) -> None:
        """``out`` [T, H] from the normed input ``hidden`` [T, H]: this worker's part of the sum."""
        assert x is not None, "the workspace has views for experts"
        self._linear(x.logits, hidden, self._router.packed)
        self._route(x.experts, x.weights, x.logits, self._renormalize)
        self._moe(out, x.wide, x.narrow, x.parts, x.index, hidden, x.experts, x.weights, self.packed, self._kind)

    def _register(
        self, loader: WeightLoader, part: str, names: list[str], shape: tuple[int, int], dtype: torch.dtype, cut: Cut | None
    ) -> None:
        weights = [f"{name}.weight" for name in names]
        loader.expect(
            dict.fromkeys(weights, shape),
            dtype,
            lambda weight: self._take(part, weight),
            cuts=dict.fromkeys(weights, cut),
            formats=self._formats,
            rounded=rounded_to(loader),
        )

    def _take(self, part: str, weight: Weight) -> None:
        self._parts[part] = adopt(self._device, weight)
        if len(self._parts) == 2:
            parts, self._parts = self._parts, {}
            self.packed = self._pack(parts["gate_up"], parts["down"], self._count, self._readers)


def canonical(name: str) -> str:
    """The name of a tensor as Qwen's checkpoints have it; Mixtral's have their own."""
    match = _MIXTRAL_NAME.fullmatch(name)
    if match is None:
        return name
    part = "gate" if match[2] is None else f"experts.{match[2]}.{_MIXTRAL[match[3]]}"
    return f"{match[1]}.mlp.{part}.weight"


def each_expert(
    weights: Iterable[tuple[str, torch.Tensor | QuantTensor]], count: int
) -> Iterator[tuple[str, torch.Tensor | QuantTensor]]:
    """The stream with canonical names, one tensor for each expert and projection.

    Checkpoints may stack them: [E, rows, columns], or packed [E rows, columns].
    """
    for full_name, tensor in weights:
        match = _STACKED_NAME.fullmatch(full_name)
        if match is None:
            yield canonical(full_name), tensor
            continue
        halves = ("gate_proj", "up_proj") if match[2] == "gate_up_proj" else (match[2],)
        for expert, part in enumerate(_split(tensor, count)):
            for half, piece in zip(halves, _split(part, len(halves)), strict=True):
                yield f"{match[1]}.{expert}.{half}.weight", piece


def _split(whole: torch.Tensor | QuantTensor, count: int) -> list[torch.Tensor | QuantTensor]:
    """``count`` parts, equal where the rows divide; what does not is left for the loader to refuse by its shape."""
    if isinstance(whole, torch.Tensor):
        return list(whole.unbind() if whole.dim() == 3 else whole.tensor_split(count))
    rows = whole.shape[0] // count
    ends = [*(index * rows for index in range(count)), whole.shape[0]]
    return [quant.take_rows(whole, begin, end) for begin, end in pairwise(ends)]
