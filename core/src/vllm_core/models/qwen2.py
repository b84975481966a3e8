"""Qwen2 and Qwen2.5: Llama with biases on q, k and v. Yang et al. 2024 (arXiv:2407.10671)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_core.models.dense import KINDS, decoder, head_size_of, late_window
from vllm_core.models.fields import Fields
from vllm_core.models.rotary import rope_of
from vllm_core.models.spec import ModelSpec

ARCHITECTURES = tuple(f"Qwen2{kind}" for kind in KINDS)


def describe(config: Mapping[str, Any], *, dtype: str, pooling: str | None) -> ModelSpec:
    """Read the specification from a config. Raises ModelConfigError."""
    fields = Fields(config)
    head_size = head_size_of(fields)
    windows = late_window(fields)
    ropes = [rope_of(fields, head_size)] * len(windows)
    return decoder(fields, dtype=dtype, pooling=pooling, head_size=head_size, windows=windows, ropes=ropes, qkv_bias=True)
