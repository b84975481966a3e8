"""Offers for every CPU: torch's own kernels where they are good, numpy on shared memory where host time counts."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_core.api import KVGroupSpec, KVLayout, Offer, UnsupportedError

PROVIDER = "vllm-cpu"
UNPADDED = "vllm-cpu-unpadded"
"""Faster for single sequences, not batch invariant: taken when asked for, `--provider linear=vllm-cpu-unpadded`."""

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_DTYPES = frozenset(ITEM_BYTES)
_OPS = "vllm_cpu.ops"


def kv_layout(group: KVGroupSpec, dtype: str, tokens_per_block: int) -> KVLayout:
    """A block holds its keys, then its values, each [tokens_per_block, heads, head size]. Pure. Raises UnsupportedError."""
    if dtype not in ITEM_BYTES:
        raise UnsupportedError(
            "KV dtype is not offered",
            on=f"{PROVIDER}, {dtype}",
            found="no such layout",
            expected=", ".join(ITEM_BYTES),
            fix="choose another --kv-cache-dtype",
        )
    block_bytes = 2 * tokens_per_block * group.num_kv_heads * group.head_size * ITEM_BYTES[dtype]
    return KVLayout(layout_id="cpu.keys-values.thd", dtype=dtype, tokens_per_block=tokens_per_block, block_bytes=block_bytes)


def _entries(module: str, *names: str) -> dict[str, str]:
    return {name: f"{_OPS}.{module}:{name}" for name in names}


def offers() -> Sequence[Offer]:
    """Offers without native code; the same on every CPU."""
    return (
        Offer(
            provider=PROVIDER,
            kind="vendor",
            ops=_entries("linear", "linear_pack", "linear"),
            dtypes=_DTYPES,
        ),
        Offer(
            provider=PROVIDER,
            kind="vendor",
            ops=_entries("experts", "moe_pack", "moe"),
            dtypes=_DTYPES,
        ),
        Offer(
            provider=PROVIDER,
            kind="vendor",
            ops=_entries("experts", "moe_route"),
        ),
        Offer(
            provider=UNPADDED,
            kind="vendor",
            priority=-1,
            ops={"linear_pack": f"{_OPS}.linear:linear_pack", "linear": f"{_OPS}.linear:linear_unpadded"},
            dtypes=_DTYPES,
        ),
        Offer(
            provider=PROVIDER,
            kind="vendor",
            ops={
                **_entries("cache", "kv_bind", "kv_write", "kv_copy", "kv_export", "kv_import"),
                **_entries("attention", "paged_attention"),
            },
            dtypes=_DTYPES,
            kv_dtypes=_DTYPES,
            features=frozenset({"sliding_window", "soft_cap", "sinks"}),
            kv_layout=kv_layout,
        ),
        Offer(
            provider=PROVIDER,
            kind="vendor",
            ops=_entries("attention", "encoder_attention"),
            dtypes=_DTYPES,
        ),
        Offer(
            provider=PROVIDER,
            kind="vendor",
            ops=_entries("comm", "all_reduce", "all_gather", "reduce_scatter"),
            dtypes=_DTYPES,
        ),
        Offer(
            provider=PROVIDER,
            kind="kernel",
            ops={
                **_entries("batch", "batch_update", "build_step", "advance"),
                **_entries("sampling", "sample"),
                **_entries("penalties", "logit_adjust"),
            },
        ),
    )
