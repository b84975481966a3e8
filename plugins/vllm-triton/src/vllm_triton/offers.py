"""Offers of these kernels by a platform. Names and metadata alone: no kernel is imported to answer."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_core.api import KVGroupSpec, KVLayout, Offer

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_DTYPES = frozenset(ITEM_BYTES)
_OPS = "vllm_triton.ops"

WHOLE_TILE_SIZES = frozenset({64, 128, 256})
"""Tokens per block of which a tile of keys lies in one block, and is read as one piece."""

SMALL_SIZES = frozenset({16, 32})
HEAD_SIZES = frozenset({32, 64, 80, 96, 112, 128, 160, 192, 256})


def kv_layout(group: KVGroupSpec, dtype: str, tokens_per_block: int) -> KVLayout:
    """A block holds its keys, then its values, each [heads, tokens_per_block, head size]: the tokens of a head lie together."""
    block_bytes = 2 * tokens_per_block * group.num_kv_heads * group.head_size * ITEM_BYTES[dtype]
    return KVLayout(layout_id="keys-values.htd", dtype=dtype, tokens_per_block=tokens_per_block, block_bytes=block_bytes)


def _entries(module: str, *names: str) -> dict[str, str]:
    return {name: f"{_OPS}.{module}:{name}" for name in names}


def offers(provider: str, architectures: Sequence[str]) -> Sequence[Offer]:
    """All ops of this distribution in a platform's name, for the ``architectures`` that its tuning was made for.

    The platform calls `vllm_triton.tuning.use` when it starts.
    """
    built = frozenset(architectures)
    kv = {
        **_entries("cache", "kv_bind", "kv_write", "kv_copy", "kv_export", "kv_import", "qk_norm_rope_kv_write"),
        **_entries("attention", "paged_attention"),
    }
    features = frozenset({"sliding_window", "soft_cap", "interleaved"})
    return (
        Offer(
            provider=provider,
            ops=kv,
            dtypes=_DTYPES,
            kv_dtypes=_DTYPES,
            head_sizes=HEAD_SIZES,
            block_sizes=WHOLE_TILE_SIZES,
            features=features,
            architectures=built,
            priority=10,
            kv_layout=kv_layout,
        ),
        Offer(
            provider=f"{provider}-gather",
            ops=kv,
            dtypes=_DTYPES,
            kv_dtypes=_DTYPES,
            head_sizes=HEAD_SIZES,
            block_sizes=SMALL_SIZES,
            features=features,
            architectures=built,
            kv_layout=kv_layout,
        ),
        Offer(
            provider=provider,
            ops=_entries("linear", "linear_pack", "linear", "linear_add", "rms_norm_linear", "rms_norm_gated_linear"),
            dtypes=_DTYPES,
            architectures=built,
        ),
        Offer(
            provider=provider,
            ops={
                **_entries("norm", "rms_norm", "add_rms_norm"),
                **_entries("elementwise", "embedding", "gather_rows", "gated_activation"),
                **_entries("cache", "rotary_embedding"),
            },
            dtypes=_DTYPES,
            features=frozenset({"interleaved"}),
            architectures=built,
        ),
        Offer(
            provider=provider,
            ops={**_entries("batch", "batch_update", "build_step", "advance"), **_entries("sampling", "sample")},
            architectures=built,
        ),
    )
