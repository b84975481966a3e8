"""KV blocks of which a token's heads lie together, as vendors' attention reads them: metadata, no torch.

The ops that need no vendor are `vllm_triton.ops.token_major`; a vendor's provider adds ``kv_write`` and ``paged_attention``.
"""

from __future__ import annotations

from vllm_core.api import KVGroupSpec, KVLayout

ITEM_BYTES = {"bfloat16": 2, "float16": 2}
DTYPES = frozenset(ITEM_BYTES)
OPS = {name: f"vllm_triton.ops.token_major:{name}" for name in ("kv_bind", "kv_copy", "kv_export", "kv_import")}


def kv_layout(group: KVGroupSpec, dtype: str, tokens_per_block: int) -> KVLayout:
    """A block holds its keys, then its values, each [tokens_per_block, heads, head size]."""
    block_bytes = 2 * tokens_per_block * group.num_kv_heads * group.head_size * ITEM_BYTES[dtype]
    return KVLayout(layout_id="keys-values.thd", dtype=dtype, tokens_per_block=tokens_per_block, block_bytes=block_bytes)
