"""Names of dtypes, as facts and plans have them, and what torch calls them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

TORCH_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
)
"""Dtypes of weights, activations and plain KV caches."""

KV_CODES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "fp8": torch.float8_e4m3fn,
        "fp8_e4m3": torch.float8_e4m3fn,
        "fp8_e5m2": torch.float8_e5m2,
        "int8": torch.int8,
    }
)
"""Dtypes of KV caches that hold codes of one byte."""
