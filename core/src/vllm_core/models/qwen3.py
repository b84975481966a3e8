"""Qwen3 and Qwen3-Embedding: norms on the heads of q and k, no biases. Yang et al. 2025 (arXiv:2505.09388)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_core.models.dense import KINDS, decoder, head_size_of, late_window
from vllm_core.models.fields import Fields
from vllm_core.models.rotary import rope_of
from vllm_core.models.spec import ModelSpec

ARCHITECTURES = tuple(f"Qwen3{kind}" for kind in KINDS)


def describe(config: Mapping[str, Any], *, dtype: str, pooling: str | None) -> ModelSpec:
    """Read the specification from a config. Raises ModelConfigError."""
    fields = Fields(config)
    head_size = head_size_of(fields, default=128)
    windows = late_window(fields)
    bias = fields.flag("attention_bias", False)
    return decoder(
        fields,
        dtype=dtype,
        pooling=pooling,
        head_size=head_size,
        windows=windows,
        ropes=[rope_of(fields, head_size)] * len(windows),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
    )
