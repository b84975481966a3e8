"""Input generators, one per op: `name(dtype, seed, shape_class)` returns the op's positional arguments.

Used by plugins' tests and by the conformance suite. `SHAPE_CLASSES` says which classes an op has. Three values are private
to a provider and therefore described: a harness turns `Weight` and `ExpertWeights` into the provider's packed form, and
`KVContent` into its blocks (`vllm_core.ops.check` does). Names of shape classes may carry options (`vllm_core.ops.classes`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vllm_core.api import FORMATS, PLAIN, DecoderLayer, DecoderLayers, QuantTensor
from vllm_core.api.quant import FP8_FORMATS
from vllm_core.ops.batch_inputs import advance, batch_update, build_step, logit_adjust, sample
from vllm_core.ops.classes import Variant
from vllm_core.ops.dtypes import TORCH_DTYPES
from vllm_core.ops.op_shapes import SHAPE_CLASSES
from vllm_core.ops.quant import FP8_SIDE, decode, quantize
from vllm_core.ops.shapes import Shape, shape_of

__all__ = ["SHAPE_CLASSES", "ExpertWeights", "KVContent", "Weight"]
__all__ += ["advance", "batch_update", "build_step", "logit_adjust", "sample"]

KV_DTYPES = {**TORCH_DTYPES, "fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""Dtypes of KV caches that hold plain values; of others, such as int8 with scales, only the provider knows the values."""


FP8_SCALES = ("fp8_tensor", "fp8_channel", "fp8_block128")
"""Formats of fp8 in the order in which seeds take them."""

SUPER_BLOCKS = {"q2_k": (80, 82), "q3_k": (108,), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,)}
"""Where ggml's blocks of 256 have their float16 scales (`ggml-common.h`): the gguf package reads such blocks, writes none."""


@dataclass(frozen=True, slots=True)
class Weight:
    """What `linear_pack` is given."""

    weight: Tensor | QuantTensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """What `moe_pack` is given: float [E 2I, H] and [E H, I]."""

    gate_up: Tensor
    down: Tensor
    num_experts: int


@dataclass(frozen=True, slots=True)
class KVContent:
    """One layer's blocks in the canonical layout of `kv_export`: float32 [num_blocks,2,tokens_per_block,Hk,D]."""

    blocks: Tensor
    dtype: str


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _normal(generator: torch.Generator, dtype: str, *size: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*size, generator=generator) * scale).to(TORCH_DTYPES[dtype])


def _like(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor)


def embedding(dtype: str, seed: int, shape_class: str) -> tuple[Any, ...]:
    """Rows of a table, with a factor."""
    shape, g = shape_of(shape_class), _generator(seed)
    weight = _normal(g, dtype, shape.vocab, shape.hidden)
    ids = torch.randint(0, shape.vocab, (shape.num_tokens,), generator=g, dtype=torch.int32)
    return weight.new_zeros(shape.num_tokens, shape.hidden), ids, weight, 1.5


def embedding_shard(dtype: str, seed: int, shape_class: str) -> tuple[Any, ...]:
    """The middle third of the table: some ids are before it, some behind."""
    out, ids, weight, scale = embedding(dtype, seed, shape_class)
    third = len(weight) // 3
    return out, ids, weight[third : 2 * third].contiguous(), third, scale


def gather_rows(dtype: str, seed: int, shape_class: str) -> tuple[Any, ...]:
    """The last token of each row."""
    shape = shape_of(shape_class)
    x = _normal(_generator(seed), dtype, shape.num_tokens, shape.hidden)
    rows = shape.query_start[1:].long() - 1
    return x.new_zeros(len(rows), shape.hidden), x, rows


def add(dtype: str, seed: int, shape_class: str) -> tuple[Any, ...]:
    """Two tensors."""
    out, a, _, _ = rms_norm(dtype, seed, shape_class)
    return out, a, a.flip(-1).contiguous()


def rms_norm(dtype: str, seed: int, shape_class: str) -> tuple[Any, ...]:
    """Rows whose sizes differ by orders of magnitude."""
    shape, g = shape_of(shape_class), _generator(seed)
    x = _normal(g, dtype, shape.num_tokens, shape.hidden, scale=3.0)
    return _like(x), x, _normal(g, "float32", shape.hidden, scale=0.3) + 1, 1e-6


def add_rms_norm(dtype: str, seed: int, shape_class: str) -> tuple[Any, ...]:
    """A residual and what is added."""
    out, x, weight, eps = rms_norm(dtype, seed, shape_class)
    return out, x.flip(-1).contiguous(), x, weight, eps


def layer_norm(dtype: str, seed: int, shape_class: str) -> tuple[Any, ...]:
    """Rows with a mean that is not 0."""
    out, x, weight, eps = rms_norm(dtype, seed, shape_class)
    return out, x + 1, weight, weight.flip(0) - 1, eps


def _table(positions: int, rotary_dim: int) -> Tensor:
    frequencies = 10000.0 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
    angles = torch.arange(positions)[:, None] * frequencies
    return torch.stack((angles.cos(), angles.sin()), dim=1)


def rotary_embedding(dtype: str, seed: int, shape_class: str) -> tuple[Any, ...]:
    """Odd seeds rotate half of each head, and seeds 2 and 3 of four are interleaved."""
    shape, g = shape_of(shape_class), _generator(seed)
    variant = shape.variant_of(seed, dtype)
    q = _normal(g, dtype, shape.num_tokens, shape.num_heads, shape.head_size)
    k = _normal(g, dtype, shape.num_tokens, shape.num_kv_heads, shape.head_size)
    rotary = shape.head_size // 2 if variant.partial else shape.head_size
    return q, k, shape.positions, _table(shape.max_seq_len, rotary // 2 * 2), variant.interleaved


def gated_activation(dtype: str, seed: int, shape_class: str) -> tuple[Any, ...]:
    """The kind goes with the seed."""
    shape = shape_of(shape_class)
    x = _normal(_generator(seed), dtype, shape.num_tokens, 2 * shape.hidden, scale=2.0)
    return x.new_zeros(shape.num_tokens, shape.hidden), x, ("silu", "gelu", "gelu_tanh")[seed % 3]


def activation(dtype: str, seed: int, shape_class: str) -> tuple[Any, ...]:
    """The kind goes with the seed."""
    shape = shape_of(shape_class)
    x = _normal(_generator(seed), dtype, shape.num_tokens, shape.hidden, scale=2.0)
    return _like(x), x, ("silu", "gelu", "gelu_tanh", "relu")[seed % 4]


def soft_cap(dtype: str, seed: int, shape_class: str) -> tuple[Any, ...]:
    """float32 logits well beyond the cap."""
    shape = shape_of(shape_class)
    return _normal(_generator(seed), "float32", shape.num_tokens, shape.vocab) * 50, 30.0


def linear_pack(dtype: str, seed: int, shape_class: str) -> tuple[Any, ...]:
    """A weight; odd seeds have a bias."""
    weight = linear(dtype, seed, shape_class)[2]
    return weight.weight, weight.bias, ("layer.0",)


def linear(dtype: str, seed: int, shape_class: str) -> tuple[Any, ...]:
    """A product whose results are about 1; odd seeds have a bias, and sizes are no multiples of a tile.

    The variant ``wide`` has an output in float32, as logits have; ``fp8`` a weight in fp8, whose format goes with the seed;
    a format's name one in that format.
    """
    shape, g = shape_of(shape_class), _generator(seed)
    inputs, outputs = shape.hidden, 3 * shape.hidden // 2 + (5 if _plain(shape, seed, dtype) else 0)
    x = _normal(g, dtype, shape.num_tokens, inputs)
    weight = _weight(shape, g, dtype, seed, outputs, inputs)
    bias = _normal(g, dtype, outputs) if seed % 2 else None
    wide = shape.variant_of(seed, dtype).wide
    out = torch.zeros(shape.num_tokens, outputs, dtype=torch.float32 if wide else x.dtype)
    return out, x, Weight(weight, bias)


def _plain(shape: Shape, seed: int, dtype: str) -> bool:
    variant = shape.variant_of(seed, dtype)
    return variant.weights == PLAIN and not variant.fp8


def _weight(shape: Shape, g: torch.Generator, dtype: str, seed: int, rows: int, columns: int) -> Tensor | QuantTensor:
    """A matrix whose products are about 1, in the format that the variant asks for."""
    variant = shape.variant_of(seed, dtype)
    if variant.fp8 or variant.weights in FP8_FORMATS:
        return _fp8(g, rows, columns, FP8_SCALES[seed % 3] if variant.fp8 else variant.weights)
    if variant.weights in SUPER_BLOCKS:
        return _super_blocks(g, rows, columns, variant.weights)
    plain = _normal(g, dtype, rows, columns, scale=columns**-0.5)
    return plain if variant.weights == PLAIN else quantize(plain, variant.weights)


def _super_blocks(g: torch.Generator, rows: int, columns: int, name: str) -> QuantTensor:
    """Random codes and small scales; what is decoded with the blocks' own scales of 1 says how large these are to be."""
    blocks = columns // FORMATS[name].block
    data = torch.randint(0, 256, (rows, blocks, FORMATS[name].block_bytes), generator=g, dtype=torch.uint8)

    def scaled(factors: Tensor) -> QuantTensor:
        for at in SUPER_BLOCKS[name]:
            data[:, :, at : at + 2] = factors.to(torch.float16).unsqueeze(-1).view(torch.uint8)
        return QuantTensor(name, (rows, columns), data.view(rows, -1).clone())

    size = decode(scaled(torch.ones(rows, blocks)), torch.float32).std()
    return scaled((torch.rand(rows, blocks, generator=g) + 0.5) * columns**-0.5 / size)


def _fp8(g: torch.Generator, rows: int, columns: int, name: str) -> QuantTensor:
    """A weight in fp8: of a scale, of one a row, or of one a square."""
    scales = {"fp8_tensor": (1,), "fp8_channel": (rows,), "fp8_block128": (-(-rows // FP8_SIDE), -(-columns // FP8_SIDE))}[name]
    data = (torch.randn(rows, columns, generator=g) * 64).to(torch.float8_e4m3fn)
    return QuantTensor(name, (rows, columns), data, (torch.rand(scales, generator=g) + 0.5) * columns**-0.5 / 64)


def linear_add(dtype: str, seed: int, shape_class: str) -> tuple[Any, ...]:
    """A product added to a residual of about 1."""
    out, x, weight = linear(dtype, seed, shape_class)
    return _normal(_generator(seed + 1), dtype, *out.shape), _like(out), x, weight


def rms_norm_linear(dtype: str, seed: int, shape_class: str) -> tuple[Any, ...]:
    """A product of normed rows."""
    out, x, weight = linear(dtype, seed, shape_class)
    norm = torch.rand(x.shape[1], generator=_generator(seed + 1)) + 0.5
    return out, _like(x), x, norm, 1e-6, weight


def gated_linear(dtype: str, seed: int, shape_class: str) -> tuple[Any, ...]:
    """The first half of a gated MLP whose input is normed already."""
    out, wide, _, x, _, _, weight, kind = rms_norm_gated_linear(dtype, seed, shape_class)
    return out, wide, x, weight, kind


def rms_norm_gated_linear(dtype: str, seed: int, shape_class: str) -> tuple[Any, ...]:
    """The first half of a gated MLP; the seed turns the activation."""
    shape, g = shape_of(shape_class), _generator(seed)
    inputs, outputs = shape.hidden, shape.hidden // 2 + (3 if _plain(shape, seed, dtype) else 0)
    x = _normal(g, dtype, shape.num_tokens, inputs)
    weight = _weight(shape, g, dtype, seed, 2 * outputs, inputs)
    bias = _normal(g, dtype, 2 * outputs) if seed % 2 else None
    out = torch.zeros(shape.num_tokens, outputs, dtype=x.dtype)
    wide = torch.zeros(shape.num_tokens, 2 * outputs, dtype=x.dtype)
    norm = torch.rand(inputs, generator=g) + 0.5
    return out, wide, _like(x), x, norm, 1e-6, Weight(weight, bias), ("silu", "gelu", "gelu_tanh")[seed % 3]


def moe_route(dtype: str, seed: int, shape_class: str) -> tuple[Any, ...]:
    """Logits that are often equal with seeds 2 and 3 of four; odd seeds do not renormalise."""
    shape, g = shape_of(shape_class), _generator(seed)
    count, chosen = _experts_of(shape, seed)
    logits = torch.randn(shape.num_tokens, count, generator=g) * 2
    if seed % 4 >= 2:
        logits = logits.round()
    experts = torch.zeros(shape.num_tokens, chosen, dtype=torch.int32)
    return experts, torch.zeros(shape.num_tokens, chosen), logits, seed % 2 == 0


def _experts_of(shape: Shape, seed: int) -> tuple[int, int]:
    """Experts of a layer and of a token."""
    return shape.experts or (8, 5, 16)[seed % 3], shape.chosen or (2, 1, 3)[seed % 3]


def moe_pack(dtype: str, seed: int, shape_class: str) -> tuple[Any, ...]:
    """Experts of one layer."""
    weight = moe(dtype, seed, shape_class)[8]
    return weight.gate_up, weight.down, weight.num_experts, ("layer.0",)


def moe(dtype: str, seed: int, shape_class: str) -> tuple[Any, ...]:
    """Sizes that are no multiples of a tile, one expert that many tokens choose; the seed turns the activation."""
    shape, g = shape_of(shape_class), _generator(seed)
    (count, chosen), tokens, hidden, inner = _experts_of(shape, seed), shape.num_tokens, shape.hidden, shape.hidden // 2 + 3
    x = _normal(g, dtype, tokens, hidden)
    gate_up = _normal(g, dtype, count * 2 * inner, hidden, scale=hidden**-0.5)
    down = _normal(g, dtype, count * hidden, inner, scale=inner**-0.5)
    logits = torch.randn(tokens, count, generator=g) + 2 * (torch.arange(count) == 1)
    weights, experts = logits.softmax(-1).topk(chosen)
    pairs = tokens * chosen
    scratch = (x.new_zeros(pairs, 2 * inner), x.new_zeros(pairs, inner), x.new_zeros(pairs, hidden))
    index, kind = torch.zeros(4 * (pairs + count), dtype=torch.int32), ("silu", "gelu", "gelu_tanh")[seed % 3]
    return _like(x), *scratch, index, x, experts.int(), weights, ExpertWeights(gate_up, down, count), kind


def _content(shape: Shape, dtype: str, g: torch.Generator, unseen: Tensor | None = None) -> KVContent:
    """Random blocks; NaN in the slots that ``unseen`` [num_blocks * tokens_per_block] marks."""
    blocks = torch.randn(shape.num_blocks, 2, shape.tokens_per_block, shape.num_kv_heads, shape.head_size, generator=g)
    if unseen is not None:
        blocks[unseen.view(shape.num_blocks, 1, -1).expand(-1, 2, -1)] = float("nan")
    return KVContent(blocks.to(KV_DTYPES[dtype]).float() if dtype in KV_DTYPES else blocks, dtype)


def kv_bind(dtype: str, seed: int, shape_class: str) -> tuple[Any, ...]:
    """Zeroed memory; its bytes per block are those of the reference layout, a harness takes the provider's."""
    shape = shape_of(shape_class)
    dtype = shape.variant_of(seed, dtype).kv_dtype or dtype
    item = KV_DTYPES[dtype].itemsize if dtype in KV_DTYPES else 1
    block_bytes = 2 * shape.tokens_per_block * shape.num_kv_heads * shape.head_size * item
    memory = torch.zeros(shape.num_blocks, block_bytes, dtype=torch.uint8)
    return memory, shape.num_kv_heads, shape.head_size, dtype, shape.tokens_per_block


def kv_write(dtype: str, seed: int, shape_class: str) -> tuple[Any, ...]:
    """The step's tokens into blocks that hold something already; a KV dtype of its own where the class names one."""
    shape, g = shape_of(shape_class), _generator(seed)
    k, v = (_normal(g, dtype, shape.num_tokens, shape.num_kv_heads, shape.head_size) for _ in range(2))
    return _content(shape, _kv_dtype(shape, dtype), g), k, v, shape.slot_mapping


def _kv_dtype(shape: Shape, dtype: str) -> str:
    return (shape.variant.kv_dtype if shape.variant is not None else None) or dtype


def paged_attention(dtype: str, seed: int, shape_class: str) -> tuple[Any, ...]:
    """Seeds 1 and 3 of four have a window, 2 and 3 a soft cap; seeds from 4 on another KV dtype.

    The variant ``rest`` has NaN in every slot that no query may see, and the null block behind the window; ``sinks`` has one
    argument more.
    """
    shape, g = shape_of(shape_class), _generator(seed)
    variant = shape.variant_of(seed, dtype)
    q = _normal(g, dtype, shape.num_tokens, shape.num_heads, shape.head_size)
    window = shape.window_of(variant.window)
    unseen = ~shape.visible(window) if variant.rest else None
    content = _content(shape, variant.kv_dtype or dtype, g, unseen)
    table = shape.behind(window) if variant.rest else shape.block_table
    return _like(q), q, content, shape.query_start, shape.seq_lens, table, *_masks(shape, variant), *_sinks(shape, variant, g)


def _masks(shape: Shape, variant: Variant) -> tuple[int, int, float, int, float]:
    """Longest query and sequence, scale, window and soft cap."""
    cap = 3.0 if variant.cap else 0.0
    return shape.max_query_len, shape.max_seq_len, shape.head_size**-0.5, shape.window_of(variant.window), cap


def _sinks(shape: Shape, variant: Variant, g: torch.Generator) -> tuple[Tensor, ...]:
    """Nothing, or float32 [Hq] from -5 to 5; of four heads one has one as large as all scores, one beyond what exp holds."""
    if not variant.sinks:
        return ()
    sinks = torch.rand(shape.num_heads, generator=g) * 10 - 5
    sinks[1::4], sinks[3::4] = 9.0, 100.0
    return (sinks,)


def kv_copy(dtype: str, seed: int, shape_class: str) -> tuple[Any, ...]:
    """Half of the blocks onto the other half."""
    shape, g = shape_of(shape_class), _generator(seed)
    order = torch.randperm(shape.num_blocks, generator=g)
    half = shape.num_blocks // 2
    return _content(shape, _kv_dtype(shape, dtype), g), order[:half], order[half : 2 * half]


def kv_export(dtype: str, seed: int, shape_class: str) -> tuple[Any, ...]:
    """Some blocks in any order."""
    content, blocks, _ = kv_copy(dtype, seed, shape_class)
    return torch.zeros(len(blocks), *content.blocks.shape[1:]), content, blocks


def kv_import(dtype: str, seed: int, shape_class: str) -> tuple[Any, ...]:
    """Values that are no multiples of the KV dtype's steps."""
    content, blocks, _ = kv_copy(dtype, seed, shape_class)
    return content, torch.randn(len(blocks), *content.blocks.shape[1:], generator=_generator(seed + 1)), blocks


def qk_norm_rope_kv_write(dtype: str, seed: int, shape_class: str) -> tuple[Any, ...]:
    """Odd seeds leave the norms out."""
    q, k, positions, table, interleaved = rotary_embedding(dtype, seed, shape_class)
    content, _, v, mapping = kv_write(dtype, seed, shape_class)
    weight = None if seed % 2 else torch.linspace(0.5, 1.5, q.shape[2])
    return q, k, v, weight, weight, 1e-6, positions, table, interleaved, content, mapping


def qk_norm_rope_attention(dtype: str, seed: int, shape_class: str) -> tuple[Any, ...]:
    """Odd seeds leave the norms out; windows, soft caps and KV dtypes are the class's."""
    q, *heads, content, mapping = qk_norm_rope_kv_write(dtype, seed, shape_class)
    shape = shape_of(shape_class)
    rows = (shape.query_start, shape.seq_lens, shape.block_table)
    variant = shape.variant_of(seed, dtype)
    masks = (*_masks(shape, variant), *_sinks(shape, variant, _generator(seed + 1)))
    return _like(q), q, *heads, content, mapping, *rows, *masks


def decode_layers(dtype: str, seed: int, shape_class: str) -> tuple[Any, ...]:
    """Two layers; odd seeds leave the norms of heads out."""
    shape, g = shape_of(shape_class), _generator(seed)
    hidden, inner, q, kv = shape.hidden, 2 * shape.hidden, *(n * shape.head_size for n in (shape.num_heads, shape.num_kv_heads))
    norm = None if seed % 2 else torch.linspace(0.5, 1.5, shape.head_size)

    def weight(rows: int, columns: int) -> Weight:
        return Weight(_normal(g, dtype, rows, columns, scale=columns**-0.5), None)

    layers = DecoderLayers(
        layers=tuple(
            DecoderLayer(
                qkv=weight(q + 2 * kv, hidden),
                out=weight(hidden, q),
                gate_up=weight(2 * inner, hidden),
                down=weight(hidden, inner),
                input_norm=torch.linspace(0.5, 1.5, hidden),
                mlp_norm=torch.linspace(1.5, 0.5, hidden),
                q_norm=norm,
                k_norm=norm,
                kv=_content(shape, _kv_dtype(shape, dtype), g),
            )
            for _ in range(2)
        ),
        hidden_size=hidden,
        intermediate_size=inner,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_size=shape.head_size,
        eps=1e-6,
        scale=shape.head_size**-0.5,
        activation="silu",
        cos_sin=_table(shape.max_seq_len, shape.head_size),
    )
    residual = _normal(g, dtype, len(shape.rows), hidden)
    return residual, layers, shape.positions, shape.slot_mapping, shape.seq_lens, shape.block_table


def encoder_attention(dtype: str, seed: int, shape_class: str) -> tuple[Any, ...]:
    """Whole rows."""
    shape, g = shape_of(shape_class), _generator(seed)
    q = _normal(g, dtype, shape.num_tokens, shape.num_heads, shape.head_size)
    k, v = (_normal(g, dtype, shape.num_tokens, shape.num_kv_heads, shape.head_size) for _ in range(2))
    return _like(q), q, k, v, shape.query_start, shape.max_query_len, shape.head_size**-0.5


def pool(dtype: str, seed: int, shape_class: str) -> tuple[Any, ...]:
    """The kind goes with the seed."""
    shape = shape_of(shape_class)
    x = _normal(_generator(seed), dtype, shape.num_tokens, shape.hidden)
    kind = ("mean", "cls", "last")[seed % 3]
    return torch.zeros(len(shape.seq_lens), shape.hidden), x, shape.query_start, kind, seed % 2 == 0


def grammar_mask(dtype: str, seed: int, shape_class: str) -> tuple[Any, ...]:
    """Every other row is masked; bit 31 is used."""
    shape, g = shape_of(shape_class), _generator(seed)
    rows = torch.arange(0, len(shape.seq_lens), 2)
    words = torch.randint(-(2**31), 2**31, (len(rows), -(-shape.vocab // 32)), generator=g).int()
    return torch.randn(len(shape.seq_lens), shape.vocab, generator=g), words, rows


def log_probabilities(dtype: str, seed: int, shape_class: str) -> tuple[Any, ...]:
    """The number of largest ones goes with the seed."""
    shape, g = shape_of(shape_class), _generator(seed)
    rows = len(shape.rows)
    tokens = torch.randint(0, shape.vocab, (rows,), generator=g)
    return torch.randn(rows, shape.vocab, generator=g) * 4, tokens, seed % 6


def all_reduce(dtype: str, seed: int, shape_class: str) -> tuple[Any, ...]:
    """On the group of this rank alone."""
    return rms_norm(dtype, seed, shape_class)[1], 0


def all_gather(dtype: str, seed: int, shape_class: str) -> tuple[Any, ...]:
    """On the group of this rank alone."""
    return *rms_norm(dtype, seed, shape_class)[:2], 0


def reduce_scatter(dtype: str, seed: int, shape_class: str) -> tuple[Any, ...]:
    """On the group of this rank alone."""
    return *rms_norm(dtype, seed, shape_class)[:2], 0


def all_reduce_add_rms_norm(dtype: str, seed: int, shape_class: str) -> tuple[Any, ...]:
    """On the group of this rank alone."""
    return *add_rms_norm(dtype, seed, shape_class), 0
