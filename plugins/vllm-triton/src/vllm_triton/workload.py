"""The launches of one decoding or prompt step of a transformer, at shapes of one's choice, on host tensors.

For `vllm_triton.offline`: what is compiled and counted is what the launchers ask for. Products of many rows are a
library's and are left out. Values do not matter; KV blocks are all the same two, so that long contexts take no memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_core.api import FORMATS, BatchState, QuantTensor, StepInputs, Weight
from vllm_core.api import batch as layout
from vllm_triton.offers import block_bytes_of
from vllm_triton.ops import attention, batch, cache, elementwise, experts, linear, norm, quant, sampling

GROUP = 128
"""Inputs of a group of a four-bit weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A decoder with gated MLPs, `inner` wide; with ``experts`` a layer has so many, and a token ``chosen`` of them."""

    name: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    tied: bool = False
    experts: int = 0
    chosen: int = 0

    @property
    def layer_weights(self) -> int:
        """Elements of one layer's matrices, without those of experts."""
        inner = 0 if self.experts else 3 * self.inner
        return self.hidden * ((2 * self.heads + 2 * self.kv_heads) * self.head_size + inner)

    @property
    def head_weights(self) -> int:
        """Elements of the output projection."""
        return self.hidden * self.vocabulary


# From the configurations that their makers publish.
NARROW = Model(
    name="Qwen2.5-0.5B",
    layers=24,
    hidden=896,
    inner=4864,
    heads=14,
    kv_heads=2,
    head_size=64,
    vocabulary=151936,
    tied=True,
)
SMALL = Model(
    name="Qwen3-0.6B",
    layers=28,
    hidden=1024,
    inner=3072,
    heads=16,
    kv_heads=8,
    head_size=128,
    vocabulary=151936,
    tied=True,
)
LARGE = Model(name="Qwen3-8B", layers=36, hidden=4096, inner=12288, heads=32, kv_heads=8, head_size=128, vocabulary=151936)
SPARSE = Model(
    name="Qwen3-30B-A3B",
    layers=48,
    hidden=2048,
    inner=768,
    heads=32,
    kv_heads=4,
    head_size=128,
    vocabulary=151936,
    experts=128,
    chosen=8,
)
MODELS = {model.name: model for model in (NARROW, SMALL, LARGE, SPARSE)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """``rows`` sequences with ``queries`` new tokens each, ``context`` tokens long.

    ``kv_dtype`` is that of the KV cache, where it is not ``dtype``; ``weights`` the format of the layers' matrices.
    """

    rows: int
    queries: int
    context: int
    dtype: torch.dtype = torch.bfloat16
    tokens_per_block: int = 64
    kv_dtype: str = ""
    weights: str = "plain"

    @property
    def tokens(self) -> int:
        """Of the step."""
        return self.rows * self.queries


def launch_step(model: Model, step: Step) -> None:
    """Everything outside the layers: batch state, embedding, the last norm and head, sampling."""
    inputs, state = _inputs(step)
    residual = torch.zeros(step.tokens, model.hidden, dtype=step.dtype)
    rows = torch.zeros(step.rows, model.hidden, dtype=step.dtype)
    table = torch.empty(2048, model.hidden, dtype=step.dtype)
    elementwise.embedding(residual, inputs.token_ids, table, 1.0)
    elementwise.gather_rows(rows, residual, torch.zeros(step.rows, dtype=torch.int64))
    norm.rms_norm(rows, rows, torch.ones(model.hidden), 1e-6)
    logits = torch.zeros(step.rows, model.vocabulary)
    if step.rows <= linear.FEW:
        head = linear.linear_pack(torch.empty(model.vocabulary, model.hidden, dtype=step.dtype), None, ())
        linear.linear(logits, rows, head)
    sampled = torch.zeros(step.rows, 1, dtype=torch.int32)
    flags = torch.zeros(step.rows, dtype=torch.bool)
    sampling.sample(sampled, flags, logits, state, inputs.sample_slots, inputs.sample_lengths, layout.F_RANDOM)
    batch.advance(state, inputs, sampled)


def launch_layer(model: Model, step: Step, *, window: int = 0, soft_cap: float = 0.0) -> None:
    """One layer: fused forms where the engine binds them. With a window attention comes a second time, with sinks."""
    inputs, _ = _inputs(step)
    heads, kv_heads, size = model.heads, model.kv_heads, model.head_size
    tokens, kind = step.tokens, step.dtype
    hidden, residual = torch.zeros(tokens, model.hidden, dtype=kind), torch.zeros(tokens, model.hidden, dtype=kind)
    qkv = torch.zeros(tokens, heads + 2 * kv_heads, size, dtype=kind)
    q, k, v = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
    name = step.kv_dtype or str(kind).removeprefix("torch.")
    memory = torch.zeros(2, block_bytes_of(kv_heads, size, name, step.tokens_per_block), dtype=torch.uint8)
    kv = cache.kv_bind(memory, kv_heads, size, name, step.tokens_per_block)
    ones, table = torch.ones(size), torch.zeros(step.context + 1, 2, size // 2)
    (mapping,), (blocks,) = inputs.slot_mapping, inputs.block_tables
    few = tokens <= linear.FEW and kind != torch.float32
    if few:
        _products_before(model, step, qkv, hidden, residual)
    elif step.weights != "plain":
        _widen(model, step)
    norm.add_rms_norm(hidden, residual, hidden, torch.ones(model.hidden), 1e-6)
    cache.qk_norm_rope_kv_write(q, k, v, ones, ones, 1e-6, inputs.positions, table, False, kv, mapping)
    out = torch.zeros(tokens, heads, size, dtype=kind)
    bounds = (inputs.query_start, inputs.seq_lens, blocks, step.queries, step.context, size**-0.5)
    attention.paged_attention(out, q, kv, *bounds, window, soft_cap)
    if window:
        attention.paged_attention(out, q, kv, *bounds, window, soft_cap, torch.zeros(heads))
    if few:
        _output(model, step, out, hidden, residual)
    if model.experts:
        launch_experts(model, hidden, step.weights)
    elif few:
        _mlp(model, step, hidden, residual)
    else:
        wide = torch.zeros(tokens, 2 * model.inner, dtype=kind)
        elementwise.gated_activation(torch.zeros(tokens, model.inner, dtype=kind), wide, "silu")


def weight_of(rows: int, columns: int, dtype: torch.dtype, form: str) -> Weight:
    """A matrix [rows, columns] whose numbers do not matter. Raises KeyError for a format that `FORMATS` does not have."""
    shape = (rows, columns)
    if form == "plain":
        return torch.empty(shape, dtype=dtype)
    if FORMATS[form].block_bytes:
        row_bytes = columns // FORMATS[form].block * FORMATS[form].block_bytes
        return QuantTensor(form, shape, torch.empty(rows, row_bytes, dtype=torch.uint8))
    if form == "int4_group":
        groups = (rows, columns // GROUP)
        data = torch.empty(rows, columns // 2, dtype=torch.uint8)
        return QuantTensor(form, shape, data, torch.empty(groups), torch.empty(groups, dtype=torch.uint8))
    if form == "int8_channel":
        return QuantTensor(form, shape, torch.empty(shape, dtype=torch.int8), torch.empty(rows))
    scales = {"fp8_tensor": (1,), "fp8_channel": (rows,), "fp8_block128": (-(-rows // 128), -(-columns // 128))}[form]
    return QuantTensor(form, shape, torch.empty(shape, dtype=torch.float8_e4m3fn), torch.empty(scales))


def _packed(rows: int, columns: int, step: Step) -> linear.Packed | quant.QuantPacked:
    return linear.linear_pack(weight_of(rows, columns, step.dtype, step.weights), None, ())


def _widen(model: Model, step: Step) -> None:
    """What is left of products with quantised weights where a library does them: one weight is like another."""
    packed = _packed(model.hidden, model.heads * model.head_size, step)
    assert isinstance(packed, quant.QuantPacked), "asked of quantised weights"
    quant.widened(packed, step.dtype)


def _products_before(model: Model, step: Step, qkv: Tensor, hidden: Tensor, residual: Tensor) -> None:
    weight = _packed(qkv[0].numel(), model.hidden, step)
    linear.rms_norm_linear(qkv.view(len(qkv), -1), hidden, residual, torch.ones(model.hidden), 1e-6, weight)


def launch_experts(model: Model, hidden: Tensor, form: str = "plain") -> None:
    """Routing of ``hidden`` [T,H], and the experts' MLPs."""
    count, kind, size = len(hidden), hidden.dtype, model.experts
    pairs = count * model.chosen
    # Nothing reads plain weights: they take no memory until something does.
    gate_up = weight_of(2 * size * model.inner, model.hidden, kind, form)
    down = weight_of(size * model.hidden, model.inner, kind, form)
    packed = experts.moe_pack(gate_up, down, size, ())
    chosen, weights = torch.zeros(count, model.chosen, dtype=torch.int32), torch.zeros(count, model.chosen)
    experts.moe_route(chosen, weights, torch.zeros(count, size), True)
    wide, narrow, parts = (torch.empty(pairs, width, dtype=kind) for width in (2 * model.inner, model.inner, model.hidden))
    index = torch.zeros(4 * (pairs + size), dtype=torch.int32)
    experts.moe(torch.empty_like(hidden), wide, narrow, parts, index, hidden, chosen, weights, packed, "silu")


def _output(model: Model, step: Step, out: Tensor, hidden: Tensor, residual: Tensor) -> None:
    flat = out.view(len(out), -1)
    linear.linear_add(residual, hidden, flat, _packed(model.hidden, flat.shape[1], step))


def _mlp(model: Model, step: Step, hidden: Tensor, residual: Tensor) -> None:
    kind, count, ones = hidden.dtype, len(hidden), torch.ones(model.hidden)
    down = _packed(model.hidden, model.inner, step)
    gate_up = _packed(2 * model.inner, model.hidden, step)
    narrow, wide = torch.zeros(count, model.inner, dtype=kind), torch.zeros(count, 2 * model.inner, dtype=kind)
    linear.rms_norm_gated_linear(narrow, wide, hidden, residual, ones, 1e-6, gate_up, "silu")
    linear.linear_add(residual, hidden, narrow, down)


def _inputs(step: Step) -> tuple[StepInputs, BatchState]:
    slots, blocks = 256, -(-(step.context + step.queries) // step.tokens_per_block) + 1
    state = BatchState(
        num_slots=slots,
        tokens=torch.zeros(slots + 1, step.context + 1, dtype=torch.int32),
        computed=torch.zeros(slots + 1, dtype=torch.int32),
        params=torch.zeros(slots + 1, layout.ADMIT_WORDS, dtype=torch.int32),
        bias_ids=torch.zeros(slots + 1, layout.MAX_BIAS, dtype=torch.int32),
        bias_values=torch.zeros(slots + 1, layout.MAX_BIAS),
        stop_ids=torch.zeros(slots + 1, layout.MAX_STOP, dtype=torch.int32),
        bad_words=torch.zeros(slots + 1, layout.MAX_BAD_WORDS, dtype=torch.int32),
        block_tables=(torch.zeros(slots + 1, blocks, dtype=torch.int32),),
        tokens_per_block=(step.tokens_per_block,),
    )
    header = [1, 1, 4, 1, 1, step.rows, step.tokens, step.rows, step.queries, step.context, *[0] * 6]
    words = layout.HEADER_WORDS + layout.ADMIT_WORDS + 4 + 4 + 5 + 4 * step.rows
    packed = torch.zeros(words, dtype=torch.int32)
    batch.batch_update(state, packed, header)
    return batch.build_step(state, packed, header), state
