"""What the device offers: which ops have kernels, under which conditions. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_core.api import KVGroupSpec, KVLayout, Offer, UnsupportedError

PROVIDER = "vllm-toy"
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
DTYPES = frozenset(ITEM_BYTES)


def kv_layout(group: KVGroupSpec, dtype: str, tokens_per_block: int) -> KVLayout:
    """A block holds, head by head, the head's keys and its values. Pure. Raises UnsupportedError."""
    if dtype not in ITEM_BYTES:
        raise UnsupportedError(
            "KV dtype has no layout",
            on=dtype,
            found="no such kernels",
            expected=", ".join(ITEM_BYTES),
            fix="--kv-cache-dtype auto",
        )
    size = 2 * group.num_kv_heads * tokens_per_block * group.head_size * ITEM_BYTES[dtype]
    return KVLayout(layout_id="toy.hktd", dtype=dtype, tokens_per_block=tokens_per_block, block_bytes=size)


def offers() -> Sequence[Offer]:
    """Ops of one family are offered together. Those without a kernel are left to core's references."""
    plain = ("embedding", "gather_rows", "rms_norm", "add_rms_norm", "gated_activation")
    return (
        _offer(*plain, "logit_adjust", "sample"),
        _offer("linear_pack", "linear"),
        _offer("batch_update", "build_step", "advance"),
        _offer("all_reduce", "all_gather", "reduce_scatter", module="comm"),
        Offer(
            provider=PROVIDER,
            ops=_entries(
                "ops",
                ("kv_bind", "kv_write", "kv_copy", "kv_export", "kv_import", "paged_attention", "qk_norm_rope_kv_write"),
            ),
            dtypes=DTYPES,
            kv_dtypes=DTYPES,
            features=frozenset({"sliding_window", "soft_cap", "sinks", "interleaved"}),
            kv_layout=kv_layout,
        ),
    )


def _offer(*ops: str, module: str = "ops") -> Offer:
    return Offer(provider=PROVIDER, ops=_entries(module, ops), dtypes=DTYPES)


def _entries(module: str, ops: Sequence[str]) -> dict[str, str]:
    return {op: f"vllm_toy.{module}:{op}" for op in ops}
