"""Offers for Ascend NPUs. Names and metadata alone: nothing of torch is imported to answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vllm_ascend.backends.families import ARCHITECTURES, family_of
from vllm_core.api import (
    Accepted,
    CallSite,
    DeviceFacts,
    KVGroupSpec,
    KVLayout,
    Offer,
    Rejected,
    UnsupportedError,
    Verdict,
)

PROVIDER = "vllm-ascend"
ITEM_BYTES = {"bfloat16": 2, "float16": 2}
FLOATS = frozenset({"float32", "bfloat16", "float16"})
HALF = frozenset(ITEM_BYTES)
HEAD_SIZES = frozenset({64, 128})
BLOCK_SIZES = frozenset({128, 256, 384, 512})
"""The vendor's rule for paged attention: 128 to 512, in multiples of 128."""

KV_OPS = ("kv_bind", "kv_write", "kv_copy", "kv_export", "kv_import", "paged_attention", "qk_norm_rope_kv_write")
COPIES = frozenset({"kv_bind", "kv_copy", "kv_export", "kv_import"})


def kv_layout(group: KVGroupSpec, dtype: str, tokens_per_block: int) -> KVLayout:
    """Two regions of a layer's memory: keys, then values, each [blocks, tokens, Hk * D]. Pure. Raises UnsupportedError."""
    if dtype not in ITEM_BYTES:
        raise UnsupportedError(
            "KV dtype has no layout",
            on=dtype,
            found="the vendor's attention does not read it",
            expected=", ".join(sorted(ITEM_BYTES)),
            fix="--kv-cache-dtype auto",
        )
    size = 2 * group.num_kv_heads * tokens_per_block * group.head_size * ITEM_BYTES[dtype]
    return KVLayout(layout_id="ascend.bsh", dtype=dtype, tokens_per_block=tokens_per_block, block_bytes=size)


def offers(device: DeviceFacts) -> Sequence[Offer]:
    """Calls of torch_npu, and torch's own ops where the vendor has no fused one; the rest is left to core's references."""
    if device.device_type != "npu" or family_of(device.architecture) is None:
        return ()
    products = _offer("linear", "linear_pack", "linear", "linear_add")
    return (
        _offer("norm", "rms_norm", "add_rms_norm"),
        _offer("activation", "gated_activation"),
        _offer("rope", "rotary_embedding", features=frozenset({"interleaved"})),
        _offer("embedding", "embedding", "gather_rows"),
        _offer("experts", "moe_route"),
        _offer("experts", "moe_pack", "moe"),
        replace(products, dtypes=FLOATS - HALF),
        replace(products, dtypes=HALF, formats=frozenset({"plain", "int8_channel"})),
        Offer(
            provider=PROVIDER,
            kind="vendor",
            ops={op: f"vllm_ascend.ops.attention:{op}" for op in KV_OPS},
            kv_dtypes=HALF,
            head_sizes=HEAD_SIZES,
            block_sizes=BLOCK_SIZES,
            features=frozenset({"interleaved"}),
            architectures=frozenset(ARCHITECTURES),
            kv_layout=kv_layout,
            accepts=_one_dtype,
        ),
    )


def _one_dtype(site: CallSite) -> Verdict:
    """Attention and writes take keys as they are in the cache; copies of blocks do not care what the model computes in."""
    if site.op not in COPIES and site.kv_dtype is not None and site.kv_dtype != site.dtype:
        return Rejected("kv dtype", site.kv_dtype, f"the model's, {site.dtype}")
    return Accepted()


def _offer(module: str, *ops: str, features: frozenset[str] = frozenset()) -> Offer:
    return Offer(
        provider=PROVIDER,
        kind="vendor",
        ops={op: f"vllm_ascend.ops.{module}:{op}" for op in ops},
        dtypes=FLOATS,
        features=features,
        architectures=frozenset(ARCHITECTURES),
    )
