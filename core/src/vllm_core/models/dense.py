"""What all dense decoders of the catalog read the same way from their configs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from vllm_core.models import labels
from vllm_core.models.fields import Fields
from vllm_core.models.rotary import extended, longest
from vllm_core.models.spec import LayerSpec, ModelSpec, Pooling, RopeSpec

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
"""Names of Hugging Face, and those of the ops."""

GATED = {name: op for name, op in ACTIVATIONS.items() if op != "relu"}
KINDS = ("ForCausalLM", "Model", labels.SUFFIX)
"""What a decoder of the catalog ends with: a language head, none, or one of classes."""

SLIDING, FULL = "sliding_attention", "full_attention"


def head_size_of(fields: Fields, default: int | None = None) -> int:
    """``head_dim``, else the architecture's default, else hidden size over heads, which must divide."""
    heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    size = fields.optional_integer("head_dim", default)
    if size is not None:
        return size
    if hidden % heads:
        fields.fail("hidden_size", f"a multiple of num_attention_heads ({heads})")
    return hidden // heads


def layer_types(fields: Fields, is_sliding: Callable[[int], bool]) -> tuple[str, ...]:
    """``layer_types`` of the config, else by index."""
    count = fields.integer("num_hidden_layers")
    named = fields.names("layer_types", count, (SLIDING, FULL))
    return named if named is not None else tuple(SLIDING if is_sliding(i) else FULL for i in range(count))


def switched_window(fields: Fields) -> int | None:
    """Qwen's window: off unless ``use_sliding_window``."""
    return fields.optional_integer("sliding_window", 4096) if fields.flag("use_sliding_window", False) else None


def late_window(fields: Fields) -> tuple[int | None, ...]:
    """Windows of Qwen's dense models: `switched_window` from layer ``max_window_layers`` on."""
    window = switched_window(fields)
    first = fields.integer("max_window_layers", 28, least=0)
    types = layer_types(fields, lambda i: window is not None and i >= first)
    return tuple(window if kind == SLIDING else None for kind in types)


def decoder(
    fields: Fields,
    *,
    dtype: str,
    pooling: str | None,
    head_size: int,
    windows: Sequence[int | None],
    ropes: Sequence[RopeSpec],
    activation: str = "hidden_act",
    default_activation: str = "silu",
    tied: bool = False,
    **differences: Any,
) -> ModelSpec:
    """Build the specification of a decoder: shared keys from the config, the rest from the architecture.

    A base model (``...Model``) has no head, so its last token is pooled unless the checkpoint says how. Of a model that
    classifies it is always the last one, which has seen the whole text. Raises ModelConfigError.
    """
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        fields.fail("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
    layers = tuple(LayerSpec(window=window, rope=rope) for window, rope in zip(windows, ropes, strict=True))
    classifies = labels.classifies(fields.architecture)
    if classifies or (pooling is None and fields.architecture.endswith("Model")):
        pooling = "last"
    return ModelSpec(
        architecture=fields.architecture,
        kind="decoder",
        dtype=dtype,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        max_position=longest(fields, ropes),
        extended_position=extended(ropes),
        layers=layers,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        activation=cast("Any", fields.choice(activation, GATED, default_activation)),
        tied_embeddings=fields.flag("tie_word_embeddings", tied),
        pooling=cast("Pooling | None", pooling),
        normalize_pooled=not classifies,
        num_labels=len(labels.read(fields.config).names) if classifies else 0,
        **differences,
    )
