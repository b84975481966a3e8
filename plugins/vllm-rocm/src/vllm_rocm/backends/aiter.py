"""What AITER offers, where the probe found a version whose signatures are known. Chosen when asked for by name."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_core.api import DeviceFacts, Offer
from vllm_rocm.versions import AITER_ARCHITECTURES
from vllm_triton import token_major

PROVIDER = "aiter"
_OPS = "vllm_rocm.ops.aiter"


def offers(device: DeviceFacts) -> Sequence[Offer]:
    """Paged attention with its cache, and gated activations."""
    if "aiter" not in device.properties:
        return ()
    kv = {name: f"{_OPS}:{name}" for name in ("kv_write", "paged_attention")}
    built = frozenset(AITER_ARCHITECTURES)
    return (
        Offer(
            provider=PROVIDER,
            kind="vendor",
            ops=token_major.OPS | kv,
            dtypes=token_major.DTYPES,
            kv_dtypes=token_major.DTYPES,
            head_sizes=frozenset({64, 128, 256}),
            block_sizes=frozenset({16, 32, 64}),
            features=frozenset({"sliding_window", "soft_cap"}),
            architectures=built,
            priority=-1,
            kv_layout=token_major.kv_layout,
        ),
        Offer(
            provider=PROVIDER,
            kind="vendor",
            ops={"gated_activation": f"{_OPS}:gated_activation"},
            dtypes=token_major.DTYPES,
            architectures=built,
            priority=-1,
        ),
    )
