"""Layout of the reference KV cache, torch-free: planning asks for it before any device is opened.

A block holds its keys, then its values, each ``[tokens_per_block, num_kv_heads, head_size]``: the bytes of a block
are contiguous, and both halves of all blocks are rows of one two-dimensional view.
"""

from __future__ import annotations

from vllm_core.api.kv import KVGroupSpec, KVLayout
from vllm_core.errors import UnsupportedError

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
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
    block_bytes = 2 * tokens_per_block * group.num_kv_heads * group.head_size * size
    return KVLayout(layout_id=LAYOUT_ID, dtype=dtype, tokens_per_block=tokens_per_block, block_bytes=block_bytes)
