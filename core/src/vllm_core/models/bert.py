"""BERT encoders, as sentence embedders and classifiers use them. Devlin et al. 2018 (arXiv:1810.04805)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from vllm_core.models import labels
from vllm_core.models.dense import ACTIVATIONS
from vllm_core.models.fields import Fields
from vllm_core.models.spec import LayerSpec, ModelSpec, Pooling

ARCHITECTURES = ("BertModel", f"Bert{labels.SUFFIX}")


def describe(config: Mapping[str, Any], *, dtype: str, pooling: str | None) -> ModelSpec:
    """Read the specification from a config; pooling defaults to the mean. Raises ModelConfigError."""
    fields = Fields(config)
    classifies = labels.classifies(fields.architecture)
    heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    if hidden % heads:
        fields.fail("hidden_size", f"a multiple of num_attention_heads ({heads})")
    if fields.config.get("is_decoder"):
        fields.fail("is_decoder", "false: this definition is an encoder", fix="use --model-impl transformers")
    fields.choice("position_embedding_type", {"absolute": "absolute"}, "absolute")
    return ModelSpec(
        architecture=fields.architecture,
        kind="encoder",
        dtype=dtype,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_heads=heads,
        num_kv_heads=heads,
        head_size=hidden // heads,
        max_position=fields.integer("max_position_embeddings"),
        layers=(LayerSpec(),) * fields.integer("num_hidden_layers"),
        norm="layer",
        norm_eps=fields.number("layer_norm_eps", 1e-12),
        activation=cast("Any", fields.choice("hidden_act", ACTIVATIONS, "gelu")),
        gated=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        post_norm=True,
        token_types=fields.integer("type_vocab_size", 2),
        learned_positions=True,
        pooling="cls" if classifies else cast("Pooling", pooling or "mean"),
        normalize_pooled=not classifies,
        num_labels=len(labels.read(config).names) if classifies else 0,
        label_pooler=classifies,
        weight_prefix="bert.",
    )
