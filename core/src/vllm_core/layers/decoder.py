"""A decoder on bound ops: pre-norm layers, or Gemma's norms around both sub-layers, with dense MLPs or with experts.

Each op is a callable fetched when the model was built. The residual stream lives in one buffer. A pre-norm layer of a single
worker is five calls, whose products take norms and adds along; others are seven calls, nine with sandwich norms. Where workers
share the model each has its heads and its part of the MLP; both sub-layers' outputs are summed over the workers before they are
normed or added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from vllm_core import api
from vllm_core.api import DecoderLayers, Device, QuantTensor, StepInputs
from vllm_core.layers.experts import SparseMLP, canonical, each_expert
from vllm_core.layers.labels import LabelHead
from vllm_core.layers.linear import BoundOps, PackedLinear
from vllm_core.layers.rope import cos_sin
from vllm_core.layers.shard import ALONE, COLUMNS, Cut, Shard
from vllm_core.layers.vocabulary import Embedding, Head
from vllm_core.layers.weights import WeightLoader
from vllm_core.layers.workspace import Views, Workspace
from vllm_core.models.spec import ModelSpec, RopeSpec
from vllm_core.ops.dtypes import TORCH_DTYPES

IGNORED = ("rotary_emb.inv_freq", "masked_bias", "attn.bias")
"""Buffers that old checkpoints carry."""


Narrow = Callable[[Views], Views]


def same(x: Views) -> Views:
    """All rows."""
    return x


class NormWeight:
    """float32 weight of an RMS norm, the architecture's offset added."""

    __slots__ = ("_device", "_offset", "value")

    def __init__(self, device: Device, offset: float) -> None:
        self._device = device
        self._offset = offset
        self.value: Any = None

    def expect(self, loader: WeightLoader, name: str, size: int) -> None:
        """Register the tensor ``name`` [size]."""
        loader.expect({name: (size,)}, torch.float32, self._take, fill="ones")

    def _take(self, weight: torch.Tensor) -> None:
        self.value = self._device.adopt("weights", weight + self._offset if self._offset else weight)


class DecoderLayer:
    """Attention and MLP, dense or of experts; ``spec`` is that of one worker."""

    def __init__(
        self, spec: ModelSpec, index: int, device: Device, ops: BoundOps, table: torch.Tensor | None, shard: Shard
    ) -> None:
        layer, group = spec.layers[index], spec.kv_groups()[spec.group_of_layer()[index]]
        role = f"kv.{group.index}.{group.kind}"
        self._linear = ops.get("linear", "linear")
        self._fused = spec.is_fused_around_linear
        if self._fused:
            self._linear_add, self._norm_linear = (ops.get(op, "linear") for op in ("linear_add", "rms_norm_linear"))
        self._sparse = SparseMLP(spec, device, ops, shard) if layer.sparse else None
        if self._sparse is not None:
            self._add = ops.get("add", "residual")
        elif spec.is_fused_around_linear:
            self._norm_gated_linear = ops.get("rms_norm_gated_linear", "linear")
        else:
            self._gated_linear = ops.get("gated_linear", "linear")
        self._rms_norm = ops.get("rms_norm", "norm")
        self._add_rms_norm = summing_norm(spec, ops, shard)
        self._reduce = ops.get("all_reduce", "comm") if spec.sandwich_norms and shard.workers > 1 else None
        self._shard, self._all = shard, shard.group
        self._rope_and_write = ops.get("qk_norm_rope_kv_write", role)
        self._attention = ops.get("qk_norm_rope_attention", role)
        self._kind, self._eps, self._scale = spec.activation, spec.norm_eps, spec.scale
        self._window, self._cap = layer.window or 0, spec.attention_soft_cap
        self._group, self._table = group.index, table
        self._interleaved = layer.rope is not None and layer.rope.interleaved
        self._sandwich = spec.sandwich_norms
        self.sinks: tuple[torch.Tensor, ...] = ()
        """float32 [Hq] where the attention has sinks."""
        self.qkv, self.out, self.gate_up, self.down = (PackedLinear(device, ops) for _ in range(4))
        self.input_norm, self.q_norm, self.k_norm, self.attention_norm, self.mlp_input_norm, self.mlp_norm = (
            NormWeight(device, spec.norm_offset) for _ in range(6)
        )

    def expect(self, loader: WeightLoader, spec: ModelSpec, name: str, dtype: torch.dtype) -> None:
        """Register all weights of the layer; ``spec`` is that of the whole model, ``name`` ends with a dot."""
        hidden, size, shard = spec.hidden_size, spec.head_size, self._shard
        attention = f"{name}self_attn."
        q, kv = spec.num_heads * size, spec.num_kv_heads * size
        parts = {f"{attention}q_proj": q, f"{attention}k_proj": kv, f"{attention}v_proj": kv}
        mine = shard.kv_heads(spec)
        cuts: dict[str, Cut | None] = dict(zip(parts, (shard.heads(spec), mine, mine), strict=True))
        self.qkv.expect(loader, parts, hidden, dtype, bias=spec.qkv_bias, cuts=cuts)
        columns = shard.heads(spec, COLUMNS)
        self.out.expect_summed(loader, f"{attention}o_proj", hidden, q, dtype, bias=spec.out_bias, shard=shard, cut=columns)
        if self._sparse is not None:
            self._sparse.expect(loader, spec, f"{name}mlp.", dtype)
        else:
            self._expect_dense(loader, spec, f"{name}mlp.", dtype)
        self.input_norm.expect(loader, f"{name}input_layernorm.weight", hidden)
        if spec.qk_norm:
            self.q_norm.expect(loader, f"{attention}q_norm.weight", size)
            self.k_norm.expect(loader, f"{attention}k_norm.weight", size)
        if spec.sandwich_norms:
            self.attention_norm.expect(loader, f"{name}post_attention_layernorm.weight", hidden)
            self.mlp_input_norm.expect(loader, f"{name}pre_feedforward_layernorm.weight", hidden)
            self.mlp_norm.expect(loader, f"{name}post_feedforward_layernorm.weight", hidden)
        else:
            # Llama's name for the norm before the MLP is Gemma's for the one after attention.
            self.mlp_input_norm.expect(loader, f"{name}post_attention_layernorm.weight", hidden)

    def _expect_dense(self, loader: WeightLoader, spec: ModelSpec, name: str, dtype: torch.dtype) -> None:
        hidden, inner, shard = spec.hidden_size, spec.intermediate_size, self._shard
        both = {f"{name}gate_proj": inner, f"{name}up_proj": inner}
        cuts = dict.fromkeys(both, shard.part(inner))
        self.gate_up.expect(loader, both, hidden, dtype, bias=spec.mlp_bias, cuts=cuts)
        self.down.expect_summed(loader, f"{name}down_proj", hidden, inner, dtype, bias=spec.mlp_bias, shard=shard)

    def run_fused(self, x: Views, inputs: StepInputs, kv: Any, narrow: Narrow = same) -> Views:
        """One layer on the residual stream alone, in ops that take norms and adds along with the products.

        ``narrow`` says with which rows it goes on after attention; returns these.
        """
        eps, linear_add = self._eps, self._linear_add
        self._norm_linear(x.qkv, x.hidden, x.residual, self.input_norm.value, eps, self.qkv.packed)
        self._attend(x, inputs, kv)
        x = narrow(x)
        linear_add(x.residual, x.delta, x.attended_flat, self.out.packed)
        if self._sparse is not None:
            self._rms_norm(x.hidden, x.residual, self.mlp_input_norm.value, eps)
            self._sparse.run(x.delta, x.hidden, x.routed)
            self._add(x.residual, x.residual, x.delta)
            return x
        self._norm_gated_linear(
            x.narrow, x.wide, x.hidden, x.residual, self.mlp_input_norm.value, eps, self.gate_up.packed, self._kind
        )
        linear_add(x.residual, x.delta, x.narrow, self.down.packed)
        return x

    def run(self, x: Views, inputs: StepInputs, kv: Any, narrow: Narrow = same) -> Views:
        """One layer, from the normed input in `hidden` to the MLP's output in `delta`; ``narrow`` as in `run_fused`."""
        linear, eps = self._linear, self._eps
        linear(x.qkv, x.hidden, self.qkv.packed)
        self._attend(x, inputs, kv)
        x = narrow(x)
        linear(x.delta, x.attended_flat, self.out.packed)
        if self._reduce is not None:
            self._reduce(x.delta, self._all)
        if self._sandwich:
            self._rms_norm(x.delta, x.delta, self.attention_norm.value, eps)
        self._add_rms_norm(x.hidden, x.residual, x.delta, self.mlp_input_norm.value, eps)
        if self._sparse is not None:
            self._sparse.run(x.delta, x.hidden, x.routed)
        else:
            self._gated_linear(x.narrow, x.wide, x.hidden, self.gate_up.packed, self._kind)
            linear(x.delta, x.narrow, self.down.packed)
        if self._reduce is not None:
            self._reduce(x.delta, self._all)
        if self._sandwich:
            self._rms_norm(x.delta, x.delta, self.mlp_norm.value, eps)
        return x

    def described(self, kv: Any) -> api.DecoderLayer:
        """A dense layer's weights, with its KV, as `decode_layers` is given them."""
        return api.DecoderLayer(
            qkv=self.qkv.packed,
            out=self.out.packed,
            gate_up=self.gate_up.packed,
            down=self.down.packed,
            input_norm=self.input_norm.value,
            mlp_norm=self.mlp_input_norm.value,
            q_norm=self.q_norm.value,
            k_norm=self.k_norm.value,
            kv=kv,
        )

    def write_keys(self, x: Views, inputs: StepInputs, kv: Any) -> torch.Tensor:
        """Of a layer of whose output nothing is read: its keys and values alone. Returns no rows."""
        if self._fused:
            self._norm_linear(x.qkv, x.hidden, x.residual, self.input_norm.value, self._eps, self.qkv.packed)
        else:
            self._linear(x.qkv, x.hidden, self.qkv.packed)
        self._write(x, inputs, kv)
        return x.hidden[:0]

    def _attend(self, x: Views, inputs: StepInputs, kv: Any) -> None:
        group = self._group
        self._attention(
            x.attended,
            x.q,
            x.k,
            x.v,
            self.q_norm.value,
            self.k_norm.value,
            self._eps,
            inputs.positions,
            self._table,
            self._interleaved,
            kv,
            inputs.slot_mapping[group],
            inputs.query_start,
            inputs.seq_lens,
            inputs.block_tables[group],
            inputs.max_query_len,
            inputs.max_seq_len,
            self._scale,
            self._window,
            self._cap,
            *self.sinks,
        )

    def _write(self, x: Views, inputs: StepInputs, kv: Any) -> None:
        self._rope_and_write(
            x.q,
            x.k,
            x.v,
            self.q_norm.value,
            self.k_norm.value,
            self._eps,
            inputs.positions,
            self._table,
            self._interleaved,
            kv,
            inputs.slot_mapping[self._group],
        )


class WholeStack:
    """All layers as `decode_layers` runs them, where somebody serves it, in steps of which it takes the whole."""

    def __init__(
        self, spec: ModelSpec, ops: BoundOps, layers: Sequence[DecoderLayer], tables: Sequence[torch.Tensor | None]
    ) -> None:
        (group,) = spec.kv_groups()
        role = f"kv.{group.index}.{group.kind}"
        self._op = ops.get("decode_layers", role) if ops.has("decode_layers", role) else None
        self._spec, self._layers, self._table = spec, layers, tables[0]
        self._described: tuple[Sequence[Any], DecoderLayers] | None = None

    def run(self, x: Views, inputs: StepInputs, kv: Sequence[Any]) -> bool:
        """Run the layers on the residual stream; whether that was done."""
        if self._op is None or inputs.max_query_len != 1:
            return False
        rows = (inputs.positions, inputs.slot_mapping[0], inputs.seq_lens, inputs.block_tables[0])
        return bool(self._op(x.residual, self._of(kv), *rows))

    def _of(self, kv: Sequence[Any]) -> DecoderLayers:
        if self._described is None or self._described[0] is not kv:
            self._described = kv, self._describe(kv)
        return self._described[1]

    def _describe(self, kv: Sequence[Any]) -> DecoderLayers:
        spec = self._spec
        return DecoderLayers(
            layers=tuple(layer.described(layer_kv) for layer, layer_kv in zip(self._layers, kv, strict=True)),
            hidden_size=spec.hidden_size,
            intermediate_size=spec.intermediate_size,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            eps=spec.norm_eps,
            scale=spec.scale,
            activation=spec.activation,
            cos_sin=self._table,
        )


class Decoder:
    """The whole model, or one worker's part of it. Not usable until `load` or `load_dummy` has run.

    ``max_rows`` is the most rows that logits are asked for at once.
    """

    def __init__(
        self,
        spec: ModelSpec,
        device: Device,
        ops: BoundOps,
        *,
        max_tokens: int,
        max_model_len: int,
        shard: Shard = ALONE,
        max_rows: int | None = None,
    ) -> None:
        self._spec, self._device, self._eps = spec, device, spec.norm_eps
        self._dtype: torch.dtype = TORCH_DTYPES[spec.dtype]
        # transformers rounds the scale to the model's dtype before it multiplies.
        self._embedding_scale = float(torch.tensor(spec.embedding_scale, dtype=self._dtype))
        tied = spec.tied_embeddings and spec.pooling is None
        self._embedding = Embedding(device, ops, shard, tied=tied)
        self._rms_norm = ops.get("rms_norm", "norm")
        mine = spec.shard(shard.workers)
        self._add_rms_norm = summing_norm(mine, ops, shard)
        self._fused = mine.is_fused_around_linear
        generates = spec.pooling is None
        self._workspace = Workspace(mine, device, max_tokens, (max_rows or max_tokens) if generates else 0)
        self._gather = ops.get("gather_rows", "tail") if generates else None
        self._final_norm = NormWeight(device, spec.norm_offset)
        # A pooling model has no use for logits.
        self._head: Head | None = None
        if spec.pooling is None:
            rows, cap = max_rows or max_tokens, spec.logit_soft_cap
            self._head = Head(device, ops, shard, vocab_size=spec.vocab_size, soft_cap=cap, max_rows=rows)
        self._labels = LabelHead(spec, device, ops, max_tokens) if spec.num_labels else None
        tables = _tables(spec, device, max_model_len)
        self._layers = [DecoderLayer(mine, i, device, ops, tables[i], shard) for i in range(len(spec.layers))]
        self._norms: list[Any] = []
        self._whole = WholeStack(mine, ops, self._layers, tables) if mine.is_plain_stack else None
        self._loader = self._expected()

    def wanted(self, name: str, shape: tuple[int, ...]) -> Cut | None:
        """What this worker needs of a checkpoint tensor; None is all of it. Raises WeightsError for a wrong shape."""
        return self._loader.wanted(name if self._spec.experts is None else canonical(name), shape)

    def load(self, weights: Iterable[tuple[str, torch.Tensor | QuantTensor]]) -> None:
        """Take the weights, by their Hugging Face names, in any order, whole or as `wanted`. Raises WeightsError."""
        experts = self._spec.experts
        self._loader.load(weights if experts is None else each_expert(weights, experts.count))
        if self._head is not None and self._spec.tied_embeddings:
            self._head.share(self._embedding.weight, ["embed_tokens", "lm_head"])
        self._norms = [*(layer.input_norm.value for layer in self._layers), self._final_norm.value]

    def load_dummy(self, seed: int, bound: float | None = None) -> None:
        """Draw random weights that depend on ``seed`` and their names alone, uniform within ``bound`` if that is given."""
        device = self._device
        # Where torch's ops run and memory is the device's own, nothing of that size passes through the host.
        there = device.eager.kind == "full" and device.facts.memory_kind != "host"
        self.load(self._loader.dummy(seed, bound, partial(device.adopt, "workspace") if there else None))

    def forward(self, inputs: StepInputs, kv: Sequence[Any], rows: torch.Tensor | None = None) -> torch.Tensor:
        """Run a step; returns hidden states [T, H] after the final norm, or logits of classes, valid until the next step.

        With ``rows``, int64 [R], [R, H] of these: nothing else of the last layer is computed once its keys are written.
        """
        hidden = self._hidden(inputs, kv, rows)
        return hidden if self._labels is None else self._labels.run(hidden)

    def _hidden(self, inputs: StepInputs, kv: Sequence[Any], rows: torch.Tensor | None) -> torch.Tensor:
        x, eps, add_rms_norm = self._workspace.views(inputs.num_tokens), self._eps, self._add_rms_norm
        of_rows, gather = self._workspace.of_rows, self._gather
        narrow = same if rows is None or gather is None else partial(of_rows, rows=rows, gather=gather)
        *before, (last, last_kv) = zip(self._layers, kv, strict=True)
        self._embedding.run(x.residual, inputs.token_ids, self._embedding_scale)
        if self._whole is not None and rows is None and self._whole.run(x, inputs, kv):
            self._rms_norm(x.hidden, x.residual, self._norms[-1], eps)
            return x.hidden
        if not self._fused:
            self._rms_norm(x.hidden, x.residual, self._norms[0], eps)
        for (layer, layer_kv), next_norm in zip(before, self._norms[1:-1], strict=True):
            if self._fused:
                layer.run_fused(x, inputs, layer_kv)
            else:
                layer.run(x, inputs, layer_kv)
                add_rms_norm(x.hidden, x.residual, x.delta, next_norm, eps)
        if rows is not None and not len(rows):
            return last.write_keys(x, inputs, last_kv)
        if self._fused:
            x = last.run_fused(x, inputs, last_kv, narrow)
            self._rms_norm(x.hidden, x.residual, self._norms[-1], eps)
        else:
            x = last.run(x, inputs, last_kv, narrow)
            add_rms_norm(x.hidden, x.residual, x.delta, self._norms[-1], eps)
        return x.hidden

    def logits(self, out: torch.Tensor, rows: torch.Tensor) -> None:
        """Write float32 [R, V] from hidden rows [R, H]."""
        assert self._head is not None, "a pooling model has no head"
        self._head.run(out, rows)

    def _expected(self) -> WeightLoader:
        spec = self._spec
        ignored = IGNORED if self._head is not None and not spec.tied_embeddings else (*IGNORED, "lm_head.")
        loader = WeightLoader(spec.architecture, prefix=spec.weight_prefix, ignored=ignored, quantization=spec.quantization)
        self._embedding.expect(loader, "embed_tokens.weight", spec.vocab_size, spec.hidden_size, self._dtype)
        for index, layer in enumerate(self._layers):
            layer.expect(loader, spec, f"layers.{index}.", self._dtype)
        self._final_norm.expect(loader, "norm.weight", spec.hidden_size)
        if self._head is not None and not spec.tied_embeddings:
            self._head.expect(loader, "lm_head", spec.hidden_size, self._dtype)
        if self._labels is not None:
            self._labels.expect(loader)
        return loader


def summing_norm(spec: ModelSpec, ops: BoundOps, shard: Shard) -> Callable[..., Any]:
    """`add_rms_norm`; over the workers' sum where a layer's output has not been summed for a norm of its own."""
    if shard.workers == 1 or spec.sandwich_norms:
        return ops.get("add_rms_norm", "norm")
    fused, group = ops.get("all_reduce_add_rms_norm", "comm"), shard.group

    def call(out: torch.Tensor, residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        fused(out, residual, x, weight, eps, group)

    return call


def _tables(spec: ModelSpec, device: Device, max_model_len: int) -> list[torch.Tensor | None]:
    """One table per distinct rotary embedding, by layer. One position more: a step in flight may overshoot the end."""
    made: list[tuple[RopeSpec, torch.Tensor]] = []
    out: list[torch.Tensor | None] = []
    for layer in spec.layers:
        table = next((table for rope, table in made if rope == layer.rope), None)
        if layer.rope is not None and table is None:
            table = device.adopt("weights", cos_sin(layer.rope, max_model_len, max_model_len + 1))
            made.append((layer.rope, table))
        out.append(table)
    return out
