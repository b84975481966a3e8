"""The offers of `vllm_triton.offers`, limited to what a platform has tried of attention and of products with packed weights.

A form counts as tried where the platform's compiler makes kernels of it whose registers all fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from vllm_core.api import Accepted, CallSite, Offer, Rejected, Verdict
from vllm_triton import offers as every

NUMBERS = frozenset({"float32", "bfloat16", "float16"})
"""Dtypes of a KV cache whose elements are numbers; those of the others are codes (`kernels.codec`)."""

PLAIN = frozenset({"plain"})
"""Formats of weights that are numbers."""

READERS = frozenset({"paged_attention", "qk_norm_rope_attention"})
"""Ops that widen codes to the model's dtype."""

SPILL = "beyond that registers spill on this architecture, or nobody compiled it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """Of a KV cache the largest head, and the fewest tokens of a block."""

    largest_head: int = max(every.HEAD_SIZES)
    smallest_block: int = min(every.BLOCK_SIZES)


WHOLE = Reach()
"""All that kernels read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """What a family's chips are offered; all, unless something is left out, and ``why``.

    Dtypes of the KV cache, formats of weights; dtypes of the model that codes of either are widened to; how far caches of codes
    go, and others by their dtype, where it is less than all.
    """

    kv_dtypes: frozenset[str] = frozenset(every.ITEM_BYTES)
    dtypes: frozenset[str] = NUMBERS
    codes: Reach = WHOLE
    caches: Mapping[str, Reach] = field(default_factory=dict)
    formats: frozenset[str] = every.LINEAR_FORMATS
    why: str = SPILL

    def judge(
        self, kv_dtype: str, *, dtype: str | None = None, head_size: int | None = None, tokens_per_block: int | None = None
    ) -> Verdict:
        """Whether a cache was tried, as far as is told of it and of the model that reads it."""
        if kv_dtype not in self.kv_dtypes:
            return Rejected("kv dtype", kv_dtype, f"{_listing(self.kv_dtypes)}: {self.why}")
        over, reach = f"over a cache in {kv_dtype}", self.caches.get(kv_dtype, WHOLE if kv_dtype in NUMBERS else self.codes)
        if kv_dtype not in NUMBERS and dtype is not None and dtype not in self.dtypes:
            return Rejected(f"dtype {over}", dtype, f"{_listing(self.dtypes)}: {self.why}")
        if head_size is not None and head_size > reach.largest_head:
            return Rejected(f"head size {over}", str(head_size), f"up to {reach.largest_head}: {self.why}")
        if tokens_per_block is not None and tokens_per_block < reach.smallest_block:
            return Rejected(f"block size {over}", str(tokens_per_block), f"{reach.smallest_block} or more: {self.why}")
        return Accepted()


ALL = Tried()
"""Every form that kernels read."""


def offers(provider: str, architectures: Sequence[str], tried: Tried) -> Sequence[Offer]:
    """As `vllm_triton.offers.offers`; of dtypes that codes were not tried with, weights as they are alone."""
    return tuple(limited for one in every.offers(provider, architectures) for limited in _limited(one, tried))


def _limited(offer: Offer, tried: Tried) -> Iterator[Offer]:
    if offer.kv_dtypes is not None:
        yield replace(offer, accepts=_accepts(tried))
        return
    if "encoder_attention" in offer.ops:
        yield replace(offer, accepts=_accepts_encoder(tried, offer))
        return
    formats = offer.formats & tried.formats
    others = (offer.dtypes or frozenset()) - tried.dtypes
    if formats == PLAIN or not others:
        yield replace(offer, formats=formats)
        return
    assert offer.dtypes is not None, "others are of these"
    yield replace(offer, formats=formats, dtypes=offer.dtypes & tried.dtypes)
    yield replace(offer, formats=PLAIN, dtypes=others)


def _accepts(tried: Tried) -> Callable[[CallSite], Verdict]:
    def accepts(site: CallSite) -> Verdict:
        if site.kv_dtype is None:
            return Accepted()
        dtype = site.dtype if site.op in READERS else None
        return tried.judge(site.kv_dtype, dtype=dtype, head_size=site.head_size, tokens_per_block=site.tokens_per_block)

    return accepts


def _accepts_encoder(tried: Tried, offer: Offer) -> Callable[[CallSite], Verdict]:
    """Encoders have no cache: their tiles are those of one in the model's dtype."""

    def accepts(site: CallSite) -> Verdict:
        verdict = tried.judge(site.dtype, head_size=site.head_size)
        return verdict if isinstance(verdict, Rejected) or offer.accepts is None else offer.accepts(site)

    return accepts


def _listing(names: frozenset[str]) -> str:
    return ", ".join(sorted(names))
