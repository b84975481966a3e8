"""Llama (Llama 2 and 3, SmolLM2) and Mistral, which adds a sliding window to every layer.

Touvron et al. 2023 (arXiv:2302.13971); Jiang et al. 2023 (arXiv:2310.06825).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_core.models.dense import KINDS, decoder, head_size_of
from vllm_core.models.fields import Fields
from vllm_core.models.rotary import rope_of
from vllm_core.models.spec import ModelSpec

ARCHITECTURES = tuple(f"{name}{kind}" for name in ("Llama", "Mistral") for kind in KINDS)


def describe(config: Mapping[str, Any], *, dtype: str, pooling: str | None) -> ModelSpec:
    """Read the specification from a config. Raises ModelConfigError."""
    fields = Fields(config)
    head_size = head_size_of(fields)
    count = fields.integer("num_hidden_layers")
    mistral = fields.architecture.startswith("Mistral")
    window = fields.optional_integer("sliding_window", 4096) if mistral else None
    bias = fields.flag("attention_bias", False)
    return decoder(
        fields,
        dtype=dtype,
        pooling=pooling,
        head_size=head_size,
        windows=[window] * count,
        ropes=[rope_of(fields, head_size)] * count,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )
