"""Mixtral: Mistral with experts in every layer. Jiang et al. 2024 (arXiv:2401.04088)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_core.models.dense import decoder, head_size_of
from vllm_core.models.fields import Fields
from vllm_core.models.rotary import rope_of
from vllm_core.models.sparse import with_experts
from vllm_core.models.spec import ModelSpec

ARCHITECTURES = ("MixtralForCausalLM",)


def describe(config: Mapping[str, Any], *, dtype: str, pooling: str | None) -> ModelSpec:
    """Read the specification from a config. Raises ModelConfigError."""
    fields = Fields(config)
    head_size = head_size_of(fields)
    count = fields.integer("num_hidden_layers")
    spec = decoder(
        fields,
        dtype=dtype,
        pooling=pooling,
        head_size=head_size,
        windows=[fields.optional_integer("sliding_window")] * count,
        ropes=[rope_of(fields, head_size)] * count,
    )
    inner = fields.integer("intermediate_size")
    return with_experts(spec, fields, count="num_local_experts", inner=inner, renormalize=True, sparse=[True] * count)
