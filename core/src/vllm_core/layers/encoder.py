"""A BERT encoder on bound ops: learned positions, norms after each residual add, bidirectional attention, no KV."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from vllm_core.api import Device, QuantTensor, StepInputs
from vllm_core.layers.labels import LabelHead
from vllm_core.layers.linear import BoundOps, PackedLinear
from vllm_core.layers.shard import ALONE, COLUMNS, Cut, Shard
from vllm_core.layers.vocabulary import Embedding
from vllm_core.layers.weights import WeightLoader
from vllm_core.layers.workspace import Views, Workspace
from vllm_core.models.spec import ModelSpec
from vllm_core.ops.dtypes import TORCH_DTYPES

IGNORED = ("pooler.", "position_ids", "cls.")
"""Heads and buffers that checkpoints carry and embedding does not use."""


class LayerNorm:
    """float32 weight and bias of a layer norm."""

    __slots__ = ("_device", "bias", "weight")

    def __init__(self, device: Device) -> None:
        self._device = device
        self.weight: Any = None
        self.bias: Any = None

    def expect(self, loader: WeightLoader, name: str, size: int) -> None:
        """Register ``name``.weight and ``name``.bias [size]."""
        loader.expect({f"{name}.weight": (size,)}, torch.float32, self._take_weight, fill="ones")
        loader.expect({f"{name}.bias": (size,)}, torch.float32, self._take_bias)

    def _take_weight(self, weight: torch.Tensor) -> None:
        self.weight = self._device.adopt("weights", weight)

    def _take_bias(self, bias: torch.Tensor) -> None:
        self.bias = self._device.adopt("weights", bias)


class EncoderLayer:
    """Attention and MLP. `run` reads and leaves the hidden states in `hidden`."""

    def __init__(self, spec: ModelSpec, device: Device, ops: BoundOps, shard: Shard) -> None:
        self._linear = ops.get("linear", "linear")
        self._reduce = ops.get("all_reduce", "comm") if shard.workers > 1 else None
        self._shard, self._all = shard, shard.group
        self._add = ops.get("add", "residual")
        self._layer_norm = ops.get("layer_norm", "norm")
        self._attention = ops.get("encoder_attention", "attention")
        self._activation = ops.get("activation", "mlp")
        self._kind, self._eps, self._scale = spec.activation, spec.norm_eps, spec.scale
        self.qkv, self.out, self.up, self.down = (PackedLinear(device, ops) for _ in range(4))
        self.attention_norm, self.mlp_norm = LayerNorm(device), LayerNorm(device)

    def expect(self, loader: WeightLoader, spec: ModelSpec, name: str, dtype: torch.dtype) -> None:
        """Register all weights of the layer; ``spec`` is that of the whole model, ``name`` ends with a dot."""
        hidden, inner, shard = spec.hidden_size, spec.intermediate_size, self._shard
        attention, up = f"{name}attention.", f"{name}intermediate.dense"
        parts = {f"{attention}self.{part}": hidden for part in ("query", "key", "value")}
        self.qkv.expect(loader, parts, hidden, dtype, bias=True, cuts=dict.fromkeys(parts, shard.heads(spec)))
        columns = shard.heads(spec, COLUMNS)
        self.out.expect_summed(loader, f"{attention}output.dense", hidden, hidden, dtype, bias=True, shard=shard, cut=columns)
        self.up.expect(loader, {up: inner}, hidden, dtype, bias=True, cuts={up: shard.part(inner)})
        self.down.expect_summed(loader, f"{name}output.dense", hidden, inner, dtype, bias=True, shard=shard)
        self.attention_norm.expect(loader, f"{attention}output.LayerNorm", hidden)
        self.mlp_norm.expect(loader, f"{name}output.LayerNorm", hidden)

    def run(self, x: Views, inputs: StepInputs) -> None:
        """One layer over all tokens of the step."""
        linear, norm, eps = self._linear, self._layer_norm, self._eps
        linear(x.qkv, x.hidden, self.qkv.packed)
        self._attention(x.attended, x.q, x.k, x.v, inputs.query_start, inputs.max_query_len, self._scale)
        linear(x.delta, x.attended_flat, self.out.packed)
        if self._reduce is not None:
            self._reduce(x.delta, self._all)
        self._add(x.delta, x.delta, x.hidden)
        norm(x.hidden, x.delta, self.attention_norm.weight, self.attention_norm.bias, eps)
        linear(x.wide, x.hidden, self.up.packed)
        self._activation(x.narrow, x.wide, self._kind)
        linear(x.delta, x.narrow, self.down.packed)
        if self._reduce is not None:
            self._reduce(x.delta, self._all)
        self._add(x.delta, x.delta, x.hidden)
        norm(x.hidden, x.delta, self.mlp_norm.weight, self.mlp_norm.bias, eps)


class Encoder:
    """The whole model, or one worker's part of it. Not usable until `load` or `load_dummy` has run."""

    def __init__(self, spec: ModelSpec, device: Device, ops: BoundOps, *, max_tokens: int, shard: Shard = ALONE) -> None:
        self._spec, self._device = spec, device
        self._dtype: torch.dtype = TORCH_DTYPES[spec.dtype]
        self._embed = ops.get("embedding", "embedding")
        self._add = ops.get("add", "residual")
        self._layer_norm = ops.get("layer_norm", "norm")
        mine = spec.shard(shard.workers)
        self._workspace = Workspace(mine, device, max_tokens)
        self._words = Embedding(device, ops, shard)
        self._positions: Any = None
        self._first_type: torch.Tensor | None = None
        self._norm = LayerNorm(device)
        self._layers = [EncoderLayer(mine, device, ops, shard) for _ in spec.layers]
        self._labels = LabelHead(spec, device, ops, max_tokens) if spec.num_labels else None
        self._loader = self._expected()

    def wanted(self, name: str, shape: tuple[int, ...]) -> Cut | None:
        """What this worker needs of a checkpoint tensor; None is all of it. Raises WeightsError for a wrong shape."""
        return self._loader.wanted(name, shape)

    def load(self, weights: Iterable[tuple[str, torch.Tensor | QuantTensor]]) -> None:
        """Take the weights, by their Hugging Face names, in any order, whole or as `wanted`. Raises WeightsError."""
        self._loader.load(weights)
        # All tokens are of type 0 here, so its row is added to every position once instead of in every step.
        assert self._first_type is not None, "the loader has checked that every tensor came"
        self._positions = self._device.adopt("weights", (self._positions + self._first_type).to(self._dtype))
        self._first_type = None

    def load_dummy(self, seed: int, bound: float | None = None) -> None:
        """Draw random weights that depend on ``seed`` and their names alone, uniform within ``bound`` if that is given."""
        self.load(self._loader.dummy(seed, bound))

    def forward(self, inputs: StepInputs, kv: Sequence[Any], rows: torch.Tensor | None = None) -> torch.Tensor:
        """Run a step of whole sequences; returns hidden states [T, H], or logits of classes, valid until the next step."""
        x = self._workspace.views(inputs.num_tokens)
        self._words.run(x.hidden, inputs.token_ids, 1.0)
        self._embed(x.delta, inputs.positions, self._positions, 1.0)
        self._add(x.delta, x.delta, x.hidden)
        self._layer_norm(x.hidden, x.delta, self._norm.weight, self._norm.bias, self._spec.norm_eps)
        for layer in self._layers:
            layer.run(x, inputs)
        return x.hidden if self._labels is None else self._labels.run(x.hidden)

    def logits(self, out: torch.Tensor, rows: torch.Tensor) -> None:
        """Not part of an encoder: the engine refuses to generate with one when it plans."""
        raise AssertionError("an encoder has no head")

    def _expected(self) -> WeightLoader:
        spec, hidden = self._spec, self._spec.hidden_size
        loader = WeightLoader(spec.architecture, prefix=spec.weight_prefix, ignored=IGNORED, quantization=spec.quantization)
        self._words.expect(loader, "embeddings.word_embeddings.weight", spec.vocab_size, hidden, self._dtype)
        positions = {"embeddings.position_embeddings.weight": (spec.max_position, hidden)}
        loader.expect(positions, torch.float32, self._take_positions)
        types = {"embeddings.token_type_embeddings.weight": (spec.token_types, hidden)}
        loader.expect(types, torch.float32, self._take_types)
        self._norm.expect(loader, "embeddings.LayerNorm", hidden)
        for index, layer in enumerate(self._layers):
            layer.expect(loader, spec, f"encoder.layer.{index}.", self._dtype)
        if self._labels is not None:
            self._labels.expect(loader)
        return loader

    def _take_positions(self, weight: torch.Tensor) -> None:
        self._positions = weight

    def _take_types(self, weight: torch.Tensor) -> None:
        self._first_type = weight[0]
