"""Layout of the reference KV cache, torch-free: planning asks for it before any device is opened.

A block holds its keys, then its values, each ``[tokens_per_block, num_kv_heads, head_size]``, and, for int8, float32 scales
``[2, tokens_per_block, num_kv_heads]`` of both. Fp8 holds values as they are, rounded and saturated.
"""

from __future__ import annotations

from vllm_core.api.kv import KVGroupSpec, KVLayout
from vllm_core.errors import UnsupportedError

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1}
SCALE_BYTES = {"int8": 4}
"""Bytes of the scale that each head of a token has, once for its key and once for its value."""

LAYOUT_ID = "core.keys-values.thd"


def kv_layout(group: KVGroupSpec, dtype: str, tokens_per_block: int) -> KVLayout:
    """Return the layout of one layer of ``group``. Raises UnsupportedError for a dtype without a reference."""
    size = ITEM_BYTES.get(dtype)
    if size is None:
        raise UnsupportedError(
            "KV dtype has no reference",
            on=dtype,
            found="no such layout",
            expected=", ".join(ITEM_BYTES),
            fix="choose another --kv-cache-dtype",
        )
    head_bytes = group.head_size * size + SCALE_BYTES.get(dtype, 0)
    block_bytes = 2 * tokens_per_block * group.num_kv_heads * head_bytes
    return KVLayout(layout_id=LAYOUT_ID, dtype=dtype, tokens_per_block=tokens_per_block, block_bytes=block_bytes)
