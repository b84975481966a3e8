"""The two ends of a model that are as long as the vocabulary. Workers that share the model keep equal parts of it.

A worker embeds the tokens of its part and the parts are summed; of the logits it computes its part and all are gathered
on every worker, so that each samples the same token from the same bits.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_core.api import STACK, Device, Weight
from vllm_core.api.quant import ONLINE_FORMATS
from vllm_core.layers.linear import BoundOps, PackedLinear, adopt
from vllm_core.layers.shard import Shard
from vllm_core.layers.weights import WeightLoader


class Embedding:
    """Token embeddings; `weight` [V, H] or this worker's rows of it is set when loading is done.

    ``tied``: the head reads the same weight, which stays packed in formats that both read.
    """

    def __init__(self, device: Device, ops: BoundOps, shard: Shard, *, tied: bool = False) -> None:
        self._device, self._shard = device, shard
        self.weight: Any = None
        self._first = 0
        self._group = shard.group
        self._embed: Any
        op = "embedding" if shard.workers == 1 else "embedding_shard"
        self._formats = ops.formats(op, "embedding") - {STACK}
        if tied:
            self._formats &= ops.formats("linear_pack", "linear")
        self._tied = tied
        if shard.workers == 1:
            self._embed, self._reduce = ops.get("embedding", "embedding"), None
        else:
            self._embed, self._reduce = ops.get("embedding_shard", "embedding"), ops.get("all_reduce", "comm")

    def expect(self, loader: WeightLoader, name: str, vocab_size: int, hidden_size: int, dtype: torch.dtype) -> None:
        """Register the tensor ``name`` [vocab_size, hidden_size]."""
        part = self._shard.part(vocab_size)
        self._first = 0 if part is None else part.begin
        # Eight bits at least: every token passes through this table twice.
        rounded = ONLINE_FORMATS["int8"] if self._tied and loader.quantization is not None else ()
        loader.expect(
            {name: (vocab_size, hidden_size)}, dtype, self._take, cuts={name: part}, formats=self._formats, rounded=rounded
        )

    def run(self, out: torch.Tensor, ids: torch.Tensor, scale: float) -> None:
        """Write the embeddings of ``ids`` [T], times ``scale``, to ``out`` [T, H]."""
        if self._reduce is None:
            self._embed(out, ids, self.weight, scale)
        else:
            self._embed(out, ids, self.weight, self._first, scale)
            self._reduce(out, self._group)

    def _take(self, weight: Weight) -> None:
        self.weight = adopt(self._device, weight)


class Head:
    """From hidden rows to logits, soft cap included. ``max_rows`` is the most rows of one call."""

    def __init__(self, device: Device, ops: BoundOps, shard: Shard, *, vocab_size: int, soft_cap: float, max_rows: int) -> None:
        self._weight = PackedLinear(device, ops)
        self._linear = ops.get("linear", "linear")
        self._cap = soft_cap
        self._soft_cap = ops.get("soft_cap", "tail") if soft_cap else None
        self._vocab_size = vocab_size
        self._part, self._group = shard.part(vocab_size), shard.group
        if self._part is not None:
            self._gather = ops.get("all_gather", "comm")
            width = self._part.end - self._part.begin
            self._mine = device.allocate("workspace", (max_rows, width), torch.float32)

    def expect(self, loader: WeightLoader, name: str, hidden_size: int, dtype: torch.dtype) -> None:
        """Register the weight [V, hidden_size] of the layer ``name``."""
        self._weight.expect(loader, {name: self._vocab_size}, hidden_size, dtype, bias=False, cuts={name: self._part})

    @property
    def packed(self) -> Any:
        """The provider's form of the weight, or of this worker's rows of it."""
        return self._weight.packed

    def share(self, weight: Weight, readers: list[str]) -> None:
        """Use a weight on the device that others read too."""
        self._weight.share(weight, readers)

    def run(self, out: torch.Tensor, rows: torch.Tensor) -> None:
        """Write float32 [R, V] from hidden rows [R, H]."""
        mine = out if self._part is None else self._mine[: len(rows)]
        self._linear(mine, rows, self._weight.packed)
        if self._soft_cap is not None:
            self._soft_cap(mine, self._cap)
        if self._part is not None:
            self._gather(out, mine, self._group)
