"""Qwen3 with experts in all layers, in every so many, or in all but some. Yang et al. 2025 (arXiv:2505.09388)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_core.models.dense import decoder, head_size_of, switched_window
from vllm_core.models.fields import Fields
from vllm_core.models.rotary import rope_of
from vllm_core.models.sparse import with_experts
from vllm_core.models.spec import ModelSpec

ARCHITECTURES = ("Qwen3MoeForCausalLM",)


def describe(config: Mapping[str, Any], *, dtype: str, pooling: str | None) -> ModelSpec:
    """Read the specification from a config. Raises ModelConfigError."""
    fields = Fields(config)
    head_size, count = head_size_of(fields), fields.integer("num_hidden_layers")
    bias = fields.flag("attention_bias", False)
    spec = decoder(
        fields,
        dtype=dtype,
        pooling=pooling,
        head_size=head_size,
        windows=[switched_window(fields)] * count,
        ropes=[rope_of(fields, head_size)] * count,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
    )
    return with_experts(
        spec,
        fields,
        count="num_experts",
        inner=fields.integer("moe_intermediate_size"),
        renormalize=fields.flag("norm_topk_prob", False),
        sparse=_sparse(fields, count),
    )


def _sparse(fields: Fields, count: int) -> list[bool]:
    """Every ``decoder_sparse_step``-th layer, without those of ``mlp_only_layers``."""
    step = fields.integer("decoder_sparse_step", 1)
    dense = fields.config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in dense):
        fields.fail("mlp_only_layers", "a list of layer indices")
    return [(index + 1) % step == 0 and index not in dense for index in range(count)]
