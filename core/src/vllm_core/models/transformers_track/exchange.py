"""Modules on core's ops that take the place of those that a trial recognised.

Each holds packed weights and answers as the module did that it replaces. A pre-norm layer is the agnostic track's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vllm_core.api import Device, StepInputs
from vllm_core.layers.decoder import DecoderLayer, same
from vllm_core.layers.shard import ALONE
from vllm_core.layers.workspace import Workspace
from vllm_core.models.spec import ModelSpec, RopeSpec
from vllm_core.models.transformers_track.attention import PagedStep
from vllm_core.models.transformers_track.description import refused
from vllm_core.models.transformers_track.equations import matrix
from vllm_core.models.transformers_track.findings import AttentionForm, Findings, LayerForm, MLPForm, NormForm, RotaryForm
from vllm_core.models.transformers_track.recognise_attention import order_rows, table_of
from vllm_core.ops.dtypes import TORCH_DTYPES

if TYPE_CHECKING:
    from vllm_core.engine.binding import BoundOps
    from vllm_core.models.transformers_track.model import Limits


class Norm(nn.Module):
    """x [1, ..., H] normed by the op `rms_norm`."""

    def __init__(self, call: Callable[..., Any], weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self._call, self.weight, self.eps = call, weight, eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply, to a new tensor."""
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        if x.numel():
            rows = x if x.dim() < 3 else x[0]
            if rows.dim() > 2 and rows.stride(-2) != rows.shape[-1]:
                rows = rows.contiguous()
            self._call(out.view(rows.shape), rows, self.weight, self.eps)
        return out


class GatedMLP(nn.Module):
    """x [1, T, H] through gate and up in one product, the gate, and the product down."""

    def __init__(self, ops: BoundOps, gate_up: Any, down: Any, inner: int, kind: str) -> None:
        super().__init__()
        self._gated, self._linear = ops.get("gated_linear", "linear"), ops.get("linear", "linear")
        self._gate_up, self._down, self._inner, self._kind = gate_up, down, inner, kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply, to a new tensor."""
        rows = x.flatten(0, -2)
        wide, narrow = (rows.new_empty((rows.shape[0], width)) for width in (2 * self._inner, self._inner))
        self._gated(narrow, wide, rows, self._gate_up, self._kind)
        out = torch.empty_like(rows, memory_format=torch.contiguous_format)
        self._linear(out, narrow, self._down)
        return out.view(x.shape)


class Attention(nn.Module):
    """Attention from its input [1, T, H] to its output: queries, keys and values of one product, normed, rotated, written."""

    def __init__(self, spec: ModelSpec, form: AttentionForm, ops: BoundOps, scale: float) -> None:
        super().__init__()
        index = spec.group_of_layer()[form.layer]
        group = spec.kv_groups()[index]
        role = f"kv.{index}.{group.kind}"
        self._linear = ops.get("linear", "linear")
        self._attend = ops.get("qk_norm_rope_attention", role)
        self._sizes = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        self._size, self._group, self._scale = spec.head_size, index, scale
        self._index, self._window, self._cap = form.layer, spec.layers[form.layer].window or 0, spec.attention_soft_cap
        self._interleaved = form.rotary is not None and form.rotary.interleaved
        self._none = (None,) * (form.results - 1)
        self._alone = not form.results
        self.qkv: Any = None
        self.out: Any = None
        self.sinks: tuple[torch.Tensor, ...] = ()
        self.q_norm: torch.Tensor | None = None
        self.k_norm: torch.Tensor | None = None
        self.table: torch.Tensor | None = None
        self.eps = 1e-6

    def forward(self, *args: Any, vllm_core_step: PagedStep, **kwargs: Any) -> Any:
        """Apply, to a new tensor."""
        x: torch.Tensor = args[0] if args else kwargs["hidden_states"]
        rows, step = x.flatten(0, -2), vllm_core_step
        inputs, kv = step.inputs, step.kv[self._index]
        step.calls += 1
        qkv = rows.new_empty((rows.shape[0], sum(self._sizes) * self._size))
        self._linear(qkv, rows, self.qkv)
        q, k, v = torch.split(qkv.view(rows.shape[0], -1, self._size), self._sizes, dim=1)
        attended = torch.empty_like(q, memory_format=torch.contiguous_format)
        self._attend(
            attended,
            q,
            k,
            v,
            self.q_norm,
            self.k_norm,
            self.eps,
            inputs.positions,
            self.table,
            self._interleaved,
            kv,
            inputs.slot_mapping[self._group],
            inputs.query_start,
            inputs.seq_lens,
            inputs.block_tables[self._group],
            inputs.max_query_len,
            inputs.max_seq_len,
            self._scale,
            self._window,
            self._cap,
            *self.sinks,
        )
        out = torch.empty_like(rows, memory_format=torch.contiguous_format)
        self._linear(out, attended.flatten(1), self.out)
        out = out.view(x.shape)
        return out if self._alone else (out, *self._none)


class Layer(nn.Module):
    """A pre-norm layer. The residual stream stays in one buffer from the first such layer to the last.

    ``narrows``: it is the last layer, and goes on with those rows alone that the step asks for.
    """

    def __init__(self, layer: DecoderLayer, index: int, workspace: Workspace, gather: Any, results: int, narrows: bool) -> None:
        super().__init__()
        self.inner, self.workspace, self._index, self._gather = layer, workspace, index, gather
        self._narrows, self._alone, self._none = narrows, not results, (None,) * (results - 1)

    def forward(self, *args: Any, vllm_core_step: PagedStep, **kwargs: Any) -> Any:
        """Apply; the result is overwritten by the next layer."""
        hidden: torch.Tensor = args[0] if args else kwargs["hidden_states"]
        step = vllm_core_step
        step.calls += 1
        x, rows, narrow = self.workspace.views(step.inputs.num_tokens), step.rows, same
        if hidden.data_ptr() != x.residual.data_ptr():
            x.residual.copy_(hidden[0])
        if self._narrows and rows is not None:
            if not len(rows):
                out = self.inner.write_keys(x, step.inputs, step.kv[self._index])[None]
                return out if self._alone else (out, *self._none)
            narrow = partial(self.workspace.of_rows, rows=rows, gather=self._gather)
        x = self.inner.run_fused(x, step.inputs, step.kv[self._index], narrow)
        out = x.residual[None]
        return out if self._alone else (out, *self._none)


class Stack:
    """A whole body: embedding, pre-norm layers and final norm, without transformers' code between them."""

    def __init__(self, layers: Sequence[Layer], ops: BoundOps, embedding: torch.Tensor, norm: Norm) -> None:
        self._layers = [one.inner for one in layers]
        self._workspace = layers[0].workspace
        self._embed, self._rms_norm = ops.get("embedding", "embedding"), ops.get("rms_norm", "norm")
        self._gather = ops.get("gather_rows", "tail")
        self._embedding, self._norm, self._eps = embedding, norm.weight, norm.eps

    def run(self, inputs: StepInputs, kv: Sequence[Any], rows: torch.Tensor | None) -> torch.Tensor:
        """Hidden states [T, H] after the final norm, or [R, H] of ``rows``, valid until the next step."""
        x = self._workspace.views(inputs.num_tokens)
        narrow = same if rows is None else partial(self._workspace.of_rows, rows=rows, gather=self._gather)
        *before, (last, last_kv) = zip(self._layers, kv, strict=True)
        self._embed(x.residual, inputs.token_ids, self._embedding, 1.0)
        for layer, layer_kv in before:
            layer.run_fused(x, inputs, layer_kv)
        if rows is not None and not len(rows):
            return last.write_keys(x, inputs, last_kv)
        x = last.run_fused(x, inputs, last_kv, narrow)
        self._rms_norm(x.hidden, x.residual, self._norm, self._eps)
        return x.hidden


class Silent(nn.Module):
    """Stands for a rotary module whose cosines and sines nobody reads."""

    def forward(self, *_: Any, **__: Any) -> tuple[None, None]:
        """Nothing, twice."""
        return None, None


class Exchange:
    """Exchanges modules of one loaded model, before the rest of it is moved to the device."""

    def __init__(
        self,
        model: nn.Module,
        spec: ModelSpec,
        found: Findings,
        device: Device,
        ops: BoundOps,
        limits: Limits,
    ) -> None:
        self._model, self._spec, self._found, self._device, self._ops = model, spec, found, device, ops
        self._limits, self._longest = limits, limits.max_model_len
        self._adopt = partial(device.adopt, "weights")
        # The class without a head has no name for its body.
        base = getattr(model, "base_model_prefix", "")
        self._prefix = f"{base}." if base and not hasattr(model, base) else ""
        self._pack = ops.get("linear_pack", "linear")
        self._tables: dict[tuple[str, tuple[tuple[str, str], ...], str], torch.Tensor] = {}
        self._workspaces: dict[int, Workspace] = {}

    def run(self) -> None:
        """Exchange all that was recognised; rotary modules last, which tables are made by."""
        found = self._found
        for layer in found.layers:
            self._set(layer.path, self._layer(layer))
        for attention in found.attentions:
            self._set(attention.path, self._attention(attention))
        for mlp in found.mlps:
            self._set(mlp.path, self._mlp(mlp))
        if found.norms:
            call = self._ops.get("rms_norm", "norm")
            for norm in found.norms:
                self._set(norm.path, Norm(call, self._norm(norm), self._eps(norm)))
        for path in found.silent:
            self._set(path, Silent())

    def stack(self) -> Stack | None:
        """The whole body, where nothing of the model's own is left of it. Called when all weights are on the device."""
        chain = self._found.chain
        if chain is None:
            return None
        layers = [self._get(one.path) for one in self._found.layers]
        return Stack(layers, self._ops, self._get(chain.embedding).weight.detach(), self._get(chain.norm.path))

    def _set(self, path: str, module: nn.Module) -> None:
        self._model.set_submodule(path.removeprefix(self._prefix), module)

    def _get(self, path: str) -> Any:
        return self._model.get_submodule(path.removeprefix(self._prefix))

    def _layer(self, form: LayerForm) -> Layer:
        index, attention = form.attention.layer, form.attention
        inner, gate_up, down = self._gated(form.mlp)
        spec = replace(
            self._spec,
            layers=tuple(replace(one, rope=_rope(attention.rotary)) for one in self._spec.layers),
            intermediate_size=inner,
            activation=form.mlp.kind,
            norm_eps=self._eps(form.input_norm),
            attention_scale=self._get(attention.path).scaling,
        )
        if inner not in self._workspaces:
            self._workspaces[inner] = Workspace(spec, self._device, self._limits.max_tokens, self._limits.max_rows)
        made = DecoderLayer(spec, index, self._device, self._ops, self._table(attention.rotary), ALONE)
        made.qkv.packed, made.out.packed = self._qkv(attention), self._packed([attention.out])
        made.gate_up.packed, made.down.packed = gate_up, down
        made.sinks = self._sinks(attention)
        made.input_norm.value, made.mlp_input_norm.value = self._norm(form.input_norm), self._norm(form.mlp_norm)
        made.q_norm.value, made.k_norm.value = (
            None if norm is None else self._norm(norm) for norm in (attention.q_norm, attention.k_norm)
        )
        gather = self._ops.get("gather_rows", "tail")
        narrows = self._found.narrows and index == len(spec.layers) - 1
        return Layer(made, index, self._workspaces[inner], gather, form.results, narrows)

    def _attention(self, form: AttentionForm) -> Attention:
        made = Attention(self._spec, form, self._ops, self._get(form.path).scaling)
        made.qkv, made.out, made.table = self._qkv(form), self._packed([form.out]), self._table(form.rotary)
        made.sinks = self._sinks(form)
        if form.q_norm is not None and form.k_norm is not None:
            made.q_norm, made.k_norm, made.eps = self._norm(form.q_norm), self._norm(form.k_norm), self._eps(form.q_norm)
        return made

    def _sinks(self, form: AttentionForm) -> tuple[torch.Tensor, ...]:
        """float32 [Hq], or nothing."""
        return (self._adopt(self._get(form.path).get_parameter(form.sinks).detach().float()),) if form.sinks else ()

    def _mlp(self, form: MLPForm) -> GatedMLP:
        inner, gate_up, down = self._gated(form)
        return GatedMLP(self._ops, gate_up, down, inner, form.kind)

    def _gated(self, form: MLPForm) -> tuple[int, Any, Any]:
        """Inner width, gate and up in one, down."""
        inner = matrix(self._get(form.down))[0].shape[1]
        return inner, self._packed(form.products), self._packed([form.down])

    def _qkv(self, form: AttentionForm) -> Any:
        spec = self._spec
        rows = None if form.order == "parts" else order_rows(form.order, spec.num_heads, spec.num_kv_heads, spec.head_size)
        found = sum(len(matrix(self._get(path))[0]) for path in form.products)
        expected = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_size
        if found != expected:
            raise refused(form.path, f"{found} features of queries, keys and values, where the config says {expected}")
        return self._packed(form.products, rows)

    def _packed(self, paths: Sequence[str], rows: torch.Tensor | None = None) -> Any:
        """The weights of layers one below the other, in the order ``rows``, packed by their provider."""
        dtype = TORCH_DTYPES[self._spec.dtype]
        both = [matrix(self._get(path)) for path in paths]
        parts = [(weight.to(dtype), None if one is None else one.to(dtype)) for weight, one in both]
        bias = None
        if any(one is not None for _, one in parts):
            bias = torch.cat([weight.new_zeros(len(weight)) if one is None else one for weight, one in parts])
        weight = torch.cat([weight for weight, _ in parts]) if len(parts) > 1 else parts[0][0].contiguous()
        if rows is not None:
            weight, bias = weight[rows], None if bias is None else bias[rows]
        return self._pack(self._adopt(weight), None if bias is None else self._adopt(bias), list(paths))

    def _norm(self, form: NormForm) -> torch.Tensor:
        weight: torch.Tensor = self._get(form.path).weight.detach()
        return self._adopt(weight.float() + form.offset if form.offset else weight.float())

    def _eps(self, form: NormForm) -> float:
        return float(getattr(self._get(form.path), form.eps))

    def _table(self, form: RotaryForm | None) -> torch.Tensor | None:
        """Cosines and sines as the model's own module computes them, in float32, of all positions."""
        if form is None:
            return None
        key = (form.path, form.extras, form.pairs)
        if key not in self._tables:
            module = self._get(form.path)
            args = [one for name, one in form.extras if name.isdigit()]
            named = {name: one for name, one in form.extras if not name.isdigit()}
            # One position more, as a step in flight may overshoot the end; no larger number, which some tables change with.
            positions = torch.arange(self._longest + 1).clamp(max=self._longest - 1)
            with torch.no_grad():
                cos, sin = module(torch.zeros(1, 1, 1), positions[None], *args, **named)
            self._tables[key] = self._adopt(table_of(cos, sin, form.pairs))
        return self._tables[key]


def _rope(form: RotaryForm | None) -> RopeSpec | None:
    """What a layer reads of a rotary embedding whose table is made: how elements pair."""
    return None if form is None else RopeSpec(theta=1.0, rotary_dim=2, interleaved=form.interleaved)
