"""The offers of `vllm_triton.offers`, limited to what a platform has tried: caches and weights in the model's own dtype.

For platforms whose compiler has not yet seen the forms in 8 bits and fewer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vllm_core.api import Offer
from vllm_triton import offers as every

PLAIN = "plain"
KV_DTYPES = frozenset({"float32", "bfloat16", "float16"})


def offers(provider: str, architectures: Sequence[str]) -> Sequence[Offer]:
    """As `vllm_triton.offers.offers`."""
    return tuple(
        replace(one, kv_dtypes=one.kv_dtypes and one.kv_dtypes & KV_DTYPES, formats=frozenset({PLAIN}))
        for one in every.offers(provider, architectures)
        if PLAIN in one.formats
    )
