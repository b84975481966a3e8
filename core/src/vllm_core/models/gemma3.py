"""Gemma 3, text: windows in five of six layers, two rotary bases, norms around both sub-layers.

Gemma Team 2025 (arXiv:2503.19786).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_core.models.dense import FULL, SLIDING, decoder, head_size_of, layer_types
from vllm_core.models.fields import Fields
from vllm_core.models.rotary import rope_from
from vllm_core.models.spec import ModelSpec, RopeSpec

ARCHITECTURES = ("Gemma3ForCausalLM", "Gemma3TextModel")


def describe(config: Mapping[str, Any], *, dtype: str, pooling: str | None) -> ModelSpec:
    """Read the specification from a config. Raises ModelConfigError."""
    fields = Fields(config)
    if fields.config.get("use_bidirectional_attention"):
        fields.fail("use_bidirectional_attention", "false: this definition is causal", fix="use --model-impl transformers")
    head_size = head_size_of(fields, default=256)
    pattern = fields.integer("sliding_window_pattern", fields.integer("_sliding_window_pattern", 6))
    types = layer_types(fields, lambda i: (i + 1) % pattern != 0)
    window = fields.optional_integer("sliding_window", 4096)
    rope = _ropes(fields, head_size)
    bias = fields.flag("attention_bias", False)
    return decoder(
        fields,
        dtype=dtype,
        pooling=pooling,
        head_size=head_size,
        windows=[window if kind == SLIDING else None for kind in types],
        ropes=[rope[kind] for kind in types],
        activation="hidden_activation" if fields.config.get("hidden_activation") else "hidden_act",
        default_activation="gelu_pytorch_tanh",
        tied=True,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        norm_offset=1.0,
        sandwich_norms=True,
        embedding_scale=fields.integer("hidden_size") ** 0.5,
        attention_scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
        attention_soft_cap=_cap(fields, "attn_logit_softcapping"),
        logit_soft_cap=_cap(fields, "final_logit_softcapping"),
    )


def _ropes(fields: Fields, head_size: int) -> dict[str, RopeSpec]:
    """Global layers take the scaling, local ones never do. Both forms of config are read."""
    both = fields.table("rope_parameters")
    scaled = (both.table(FULL) if both is not None else None) or fields.table("rope_scaling")
    local = both.table(SLIDING) if both is not None else None
    return {
        FULL: rope_from(fields, scaled, fields.number("rope_theta", 1_000_000.0), head_size),
        SLIDING: rope_from(fields, local, fields.number("rope_local_base_freq", 10_000.0), head_size),
    }


def _cap(fields: Fields, key: str) -> float:
    return fields.number(key) if fields.config.get(key) is not None else 0.0
