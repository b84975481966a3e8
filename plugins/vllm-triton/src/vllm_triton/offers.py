"""Offers of these kernels by a platform. Names and metadata alone: no kernel is imported to answer."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_core.api import Accepted, CallSite, KVGroupSpec, KVLayout, Offer, Rejected, UnsupportedError, Verdict

_DTYPES = frozenset({"float32", "bfloat16", "float16"})
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1}
"""Bytes of a number in the KV cache."""

SCALE_BYTES = {"int8": 4}
"""Bytes of the scale that a token's key, and its value, has in each head."""

_OPS = "vllm_triton.ops"

WHOLE_TILE_SIZES = frozenset({64, 128, 256})
"""Tokens per block of which a tile of keys lies in one block, and is read as one piece."""

SMALL_SIZES = frozenset({1, 8, 16, 32})
BLOCK_SIZES = WHOLE_TILE_SIZES | SMALL_SIZES
HEAD_SIZES = frozenset({32, 64, 80, 96, 112, 128, 160, 192, 256})


LINEAR_FORMATS = frozenset({"plain", "int8_channel", "int4_group", "fp8_tensor", "fp8_channel", "fp8_block128", "q8_0", "q4_0"})
"""Formats of weights that products read as they are."""


def block_bytes_of(num_kv_heads: int, head_size: int, dtype: str, tokens_per_block: int) -> int:
    """Bytes of a block: keys and values, then their scales where the dtype has them."""
    return 2 * tokens_per_block * num_kv_heads * (head_size * ITEM_BYTES[dtype] + SCALE_BYTES.get(dtype, 0))


def kv_layout(group: KVGroupSpec, dtype: str, tokens_per_block: int) -> KVLayout:
    """A block holds its keys, then its values, each [heads, tokens_per_block, head size]: the tokens of a head lie together.

    Raises UnsupportedError for another dtype.
    """
    if dtype not in ITEM_BYTES:
        raise UnsupportedError(
            "KV dtype has no kernel",
            on=dtype,
            found="no such layout",
            expected=", ".join(ITEM_BYTES),
            fix="choose another --kv-cache-dtype",
        )
    layout_id = "keys-values.htd.scales" if dtype in SCALE_BYTES else "keys-values.htd"
    block_bytes = block_bytes_of(group.num_kv_heads, group.head_size, dtype, tokens_per_block)
    return KVLayout(layout_id=layout_id, dtype=dtype, tokens_per_block=tokens_per_block, block_bytes=block_bytes)


def _entries(module: str, *names: str) -> dict[str, str]:
    return {name: f"{_OPS}.{module}:{name}" for name in names}


def _encoder_heads(site: CallSite) -> Verdict:
    if site.head_size is not None and site.head_size > max(HEAD_SIZES):
        return Rejected("head size", str(site.head_size), f"up to {max(HEAD_SIZES)}")
    return Accepted()


def offers(provider: str, architectures: Sequence[str], *, fresh: bool = False) -> Sequence[Offer]:
    """All ops of this distribution in a platform's name, for the ``architectures`` that its tuning was made for.

    ``fresh``: `ops.fresh` too, which a platform offers where it was compiled for its chips. The platform calls
    `vllm_triton.tuning.use` when it starts.
    """
    built = frozenset(architectures)
    kv = {
        **_entries("cache", "kv_bind", "kv_write", "kv_copy", "kv_export", "kv_import", "qk_norm_rope_kv_write"),
        **_entries("attention", "paged_attention"),
        **(_entries("fresh", "qk_norm_rope_attention") if fresh else {}),
    }
    features = frozenset({"sliding_window", "soft_cap", "sinks", "interleaved"})
    return (
        Offer(
            provider=provider,
            ops=kv,
            dtypes=_DTYPES,
            kv_dtypes=frozenset(ITEM_BYTES),
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
            kv_dtypes=frozenset(ITEM_BYTES),
            head_sizes=HEAD_SIZES,
            block_sizes=SMALL_SIZES,
            features=features,
            architectures=built,
            kv_layout=kv_layout,
        ),
        Offer(
            provider=provider,
            ops=_entries(
                "linear", "linear_pack", "linear", "linear_add", "rms_norm_linear", "gated_linear", "rms_norm_gated_linear"
            ),
            dtypes=_DTYPES,
            formats=LINEAR_FORMATS,
            architectures=built,
        ),
        Offer(
            provider=provider,
            ops=_entries("experts", "moe_pack", "moe"),
            dtypes=_DTYPES,
            formats=LINEAR_FORMATS,
            architectures=built,
        ),
        Offer(
            provider=provider,
            ops={
                **_entries("norm", "rms_norm", "add_rms_norm", "layer_norm"),
                **_entries("elementwise", "embedding", "embedding_shard", "gather_rows", "add"),
                **_entries("elementwise", "gated_activation", "activation"),
                **_entries("cache", "rotary_embedding"),
                **_entries("experts", "moe_route"),
                **_entries("encoder", "pool"),
            },
            dtypes=_DTYPES,
            features=frozenset({"interleaved"}),
            architectures=built,
        ),
        Offer(
            provider=provider,
            ops=_entries("encoder", "encoder_attention"),
            dtypes=_DTYPES,
            architectures=built,
            accepts=_encoder_heads,
        ),
        Offer(
            provider=provider,
            ops={
                **_entries("batch", "batch_update", "build_step", "advance"),
                **_entries("sampling", "sample", "logit_adjust", "grammar_mask", "soft_cap", "log_probabilities"),
            },
            architectures=built,
        ),
    )
