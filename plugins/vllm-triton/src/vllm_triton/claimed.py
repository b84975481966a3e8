"""The kernels that a platform's offers promise, at shapes that no benchmark has: for `vllm_triton.offline`.

A claim covers dtypes, caches, head sizes, block sizes and formats; each is a kernel of its own, whose registers may not fit.
`claims` names those of a family, `attention` and `products` list what offers accept of one, `launch` asks for its kernels.

Kernels of sizes that are alike differ by constants of addresses and masks alone: `alike_heads`, `alike_blocks`. One of them
speaks for all, a different one each time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, product
from typing import Generic, TypeVar

import torch

from vllm_core.api import PLAIN, Accepted, CallSite, Offer
from vllm_triton.offers import block_bytes_of
from vllm_triton.offline import Compiled, OfflineDriver, compiled
from vllm_triton.ops import attention as paged
from vllm_triton.ops import cache, encoder, experts, linear, norm, quant
from vllm_triton.ops.launch import power_of_2
from vllm_triton.tried import NUMBERS, Tried
from vllm_triton.workload import weight_of

Row = TypeVar("Row")

CODES = ("int8", "fp8_e4m3", "fp8_e5m2")
"""Dtypes of a cache whose numbers are codes; "fp8" is another name of "fp8_e4m3"."""

SAME_KERNELS = frozenset({PLAIN, "fp8_tensor"})
"""Formats whose kernels other claims have: of plain weights named apart, of "fp8_tensor" those of "fp8_channel"."""

RAREST = "float32"
"""The model's dtype whose claims come last."""

GATHERED = 16
"""Tokens of a block from which on a tile of keys may lie in one block; each token of smaller ones is looked up."""

EXACT_BYTES = 4
"""Of a number of float32, whose tiles are the same on all chips."""

MOST_QUERIES = 8192
"""Numbers of a token's queries of one head of the cache, both sizes powers of two: published models have no more."""

MOST_EXACT = 16
"""Query heads of float32 that share one: more take more registers than the scalar units of some chips have."""

CONTEXT = 4096
NO_MASKS, MASKS = (0, 0.0), (512, 30.0)
"""Sliding window and soft cap: without, and with both and sinks, which takes the most registers."""

FEW, ONE, MANY = 8, 1, 64
"""Query heads that share one of the cache's."""

TURNS = ((FEW, MASKS), (ONE, NO_MASKS), (ONE, MASKS), (FEW, NO_MASKS), (FEW, MASKS))
"""Groups and masks that kinds of sizes take in turns: five, so that each kind gets others in other claims. `MANY` heads take
the most of everything, and long to compile: corners have them.
"""

COUNTS, ROWS, COLUMNS, RAGGED = (1, 64, 256), 512, (2048, 896), 200
"""Rows of x, rows and columns of a weight: columns whose product is split, those of which no half is whole tiles, and those
that are no whole tiles, which only formats without groups have."""

HIDDEN = (64, 4096, 16384)
"""Sizes of a norm's rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Attention over a cache in ``kv_dtype``, whose heads each serve ``group`` query heads. ``masks``: window and soft cap."""

    dtype: str
    kv_dtype: str
    head_size: int
    tokens_per_block: int
    group: int
    masks: tuple[int, float]

    def __str__(self) -> str:
        masked = "" if self.masks == NO_MASKS else ", window, cap, sinks"
        return f"{self.group} heads of {self.head_size}, blocks of {self.tokens_per_block}{masked}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """Products of ``count`` rows with a weight in ``form``, of experts too."""

    dtype: str
    form: str
    count: int
    columns: int

    def __str__(self) -> str:
        return f"{self.count} rows of {self.columns}"


def claims(tried: Tried) -> list[str]:
    """All that is offered of attention and products, as `asked` takes it: by the dtypes of model and cache, or of model and the
    weights' format; those that serve the most models first."""
    forms = sorted(tried.formats - SAME_KERNELS)
    by_dtype = []
    for dtype in sorted(NUMBERS, key=lambda name: (name == RAREST, name)):
        packed = dtype in tried.dtypes
        caches = [dtype, *(name for name in CODES if packed and name in tried.kv_dtypes)]
        by_dtype += [f"{dtype}/{name}" for name in caches]
        by_dtype += [f"{dtype}:{name}" for name in (PLAIN, *(forms if packed else ()))]
    return by_dtype


def alike_heads(size: int) -> tuple[int, bool]:
    """The same for head sizes whose tiles are as wide, and have columns that nothing lies in, or none."""
    return power_of_2(size), size == power_of_2(size)


def alike_blocks(tokens: int, tile: int) -> int:
    """The same for block sizes of which tiles of up to ``tile`` keys are looked up, or read, in the same way."""
    return 0 if tokens < GATHERED else min(tokens, tile)


def attention(offers: Sequence[Offer], architecture: str, dtype: str, kv_dtype: str, *, corners: bool) -> Iterator[Attention]:
    """One of each kind of head size with each kind of block size that ``offers`` accept; groups and masks take turns.

    Before them, or alone with ``corners``: the largest head in the smallest blocks, one whose size is no power of two in the
    largest, and the largest group of the largest head, and of the largest that the group may have whole.
    """
    accepted = [
        (head_size, tokens)
        for offer in offers
        if "paged_attention" in offer.ops
        for head_size in offer.head_sizes or ()
        for tokens in offer.block_sizes or ()
        if isinstance(offer.judge(_site(dtype, kv_dtype, head_size, tokens), architecture), Accepted)
    ]
    if not accepted:
        return
    heads, blocks = ({one[index] for one in accepted} for index in (0, 1))
    ragged = max((size for size in heads if size != power_of_2(size)), default=max(heads))
    crowded = max((size for size in heads if MANY * size <= MOST_QUERIES), default=min(heads))
    for size, tokens, group, masks in (
        (max(heads), min(blocks), FEW, MASKS),
        (ragged, max(blocks), FEW, MASKS),
        (crowded, max(blocks), MANY, MASKS),
        (max(heads), max(blocks), MANY, NO_MASKS),
    ):
        yield _attention(dtype, kv_dtype, size, tokens, group, masks)
    if corners:
        return
    turns, tile = cycle(TURNS), _widest_tile(heads, dtype, kv_dtype)
    for row, sizes in enumerate(_kinds(heads, alike_heads)):
        for column, many in enumerate(_kinds(blocks, lambda tokens: alike_blocks(tokens, tile))):
            turn = row + column
            yield _attention(dtype, kv_dtype, sizes[turn % len(sizes)], many[turn % len(many)], *next(turns))


def _widest_tile(heads: Collection[int], dtype: str, kv_dtype: str) -> int:
    """Most keys of a tile of the family in use."""
    codes = kv_dtype not in NUMBERS
    queries = torch.empty(0, dtype=getattr(torch, dtype))
    extend = max(paged.extend_of(size, queries, codes=codes).block_n for size in heads)
    if queries.element_size() == EXACT_BYTES:
        return extend
    return max(extend, *(paged.decode_of(size, codes=codes).block_n for size in heads))


def _kinds(sizes: Collection[int], alike: Callable[[int], Hashable]) -> list[list[int]]:
    """Sizes that are alike together, in their order."""
    kinds: dict[Hashable, list[int]] = {}
    for size in sorted(sizes):
        kinds.setdefault(alike(size), []).append(size)
    return list(kinds.values())


def _attention(dtype: str, kv_dtype: str, size: int, tokens: int, group: int, masks: tuple[int, float]) -> Attention:
    """With at most `MOST_QUERIES` numbers, or `MOST_EXACT` heads."""
    group = min(group, MOST_EXACT if dtype == "float32" else MOST_QUERIES // power_of_2(size))
    return Attention(dtype=dtype, kv_dtype=kv_dtype, head_size=size, tokens_per_block=tokens, group=group, masks=masks)


def _site(dtype: str, kv_dtype: str, head_size: int, tokens: int) -> CallSite:
    return CallSite(
        op="paged_attention",
        role="kv.0.full",
        dtype=dtype,
        kv_dtype=kv_dtype,
        head_size=head_size,
        tokens_per_block=tokens,
    )


def products(offers: Sequence[Offer], architecture: str, dtype: str, form: str) -> Iterator[Product]:
    """Products with weights in a format, where one of ``offers`` accepts it."""
    site = CallSite(op="linear", role="mlp.up", dtype=dtype, format=form)
    if any("linear" in one.ops and isinstance(one.judge(site, architecture), Accepted) for one in offers):
        ragged = (RAGGED,) if form in ("int8_channel", "fp8_tensor", "fp8_channel") else ()
        for count, columns in product(COUNTS, (*COLUMNS, *ragged)):
            yield Product(dtype=dtype, form=form, count=count, columns=columns)


def asked(offers: Sequence[Offer], architecture: str, claim: str, *, corners: bool) -> list[Attention | Product]:
    """What ``offers`` accept of a claim: ``DTYPE/KV_DTYPE`` is attention, ``DTYPE:FORMAT`` products."""
    dtype, over, kv_dtype = claim.partition("/")
    if over:
        return [*attention(offers, architecture, dtype, kv_dtype, corners=corners)]
    dtype, _, form = claim.partition(":")
    return [*products(offers, architecture, dtype, form)]


@dataclass(slots=True)
class Sweep(Generic[Row]):
    """Compiles claim after claim, what several have once, and reads a row of each kernel with ``read``.

    ``driver`` is Triton's, ``offers`` what the family has tried; its tuning is in use.
    """

    driver: OfflineDriver
    offers: Sequence[Offer]
    architecture: str
    read: Callable[[Compiled, str], Row]
    corners: bool = False
    _known: dict[str, Row] = field(default_factory=dict)

    def new(self, claim: str) -> Iterator[Row]:
        """Rows of kernels that no claim before had, as they are compiled."""
        self.driver.launches.clear()
        for one in asked(self.offers, self.architecture, claim, corners=self.corners):
            launch(one)
            for found in compiled():
                if found.metadata.hash not in self._known:
                    row = self._known[found.metadata.hash] = self.read(found, str(one))
                    yield row

    def whole(self) -> list[Row]:
        """Rows of all kernels of the claim that was asked for last."""
        return [self._known[name] for name in dict.fromkeys(one.hash for one in self.driver.launches)]


def launch(one: Attention | Product) -> None:
    """Ask for its kernels."""
    if isinstance(one, Attention):
        _attend(one)
    else:
        _multiply(one)


def _attend(one: Attention) -> None:
    """The cache's ops, then attention of a prompt beside a decoding row."""
    kind, size, heads, rows = getattr(torch, one.dtype), one.head_size, 2, 2
    memory = torch.zeros(2, block_bytes_of(heads, size, one.kv_dtype, one.tokens_per_block), dtype=torch.uint8)
    kv = cache.kv_bind(memory, heads, size, one.kv_dtype, one.tokens_per_block)
    q, k = torch.zeros(rows, heads * one.group, size, dtype=kind), torch.zeros(rows, heads, size, dtype=kind)
    slots, ones, positions = torch.zeros(rows, dtype=torch.int64), torch.ones(size), torch.zeros(rows, dtype=torch.int32)
    cache.kv_write(kv, k, k, slots)
    table = torch.zeros(2, 2, size // 2)
    cache.qk_norm_rope_kv_write(q, k, k, ones, ones, 1e-6, positions, table, False, kv, slots)
    canonical = torch.zeros(1, 2, one.tokens_per_block, heads, size)
    cache.kv_export(canonical, kv, slots[:1])
    cache.kv_import(kv, canonical, slots[:1])
    starts = torch.arange(rows + 1, dtype=torch.int32)
    lengths = torch.full((rows,), CONTEXT, dtype=torch.int32)
    blocks = torch.zeros(rows, -(-CONTEXT // one.tokens_per_block), dtype=torch.int32)
    sinks = None if one.masks == NO_MASKS else torch.zeros(heads * one.group)
    paged.paged_attention(q, q, kv, starts, lengths, blocks, 2, CONTEXT, size**-0.5, *one.masks, sinks)
    if one.dtype == one.kv_dtype:
        encoder.encoder_attention(q, q, k, k, starts, 2048, size**-0.5)


def _multiply(one: Product) -> None:
    """Each epilogue with and without a bias, the widened weight, a mixture of four experts of which two are chosen; norms."""
    kind, count, columns, many, top = getattr(torch, one.dtype), one.count, one.columns, 4, 2
    weight, x = weight_of(2 * ROWS, columns, kind, one.form), torch.zeros(count, columns, dtype=kind)
    out, wide = torch.zeros(count, ROWS, dtype=kind), torch.zeros(count, 2 * ROWS, dtype=kind)
    for bias in (None, torch.zeros(2 * ROWS, dtype=kind)):
        packed = linear.linear_pack(weight, bias, ())
        if isinstance(packed, quant.QuantPacked):
            for epilogue, target in ((0, wide), (1, wide), (2, out)):
                if quant.takes(x, epilogue):
                    quant.few_rows(target, x, packed, epilogue)
            quant.widened(packed, kind)
        elif count <= packed.few:
            linear.linear(wide, x, packed)
            linear.linear_add(wide, wide, x, packed)
            linear.gated_linear(out, wide, x, packed, "silu")
    pairs = count * top
    gate_up, down = weight_of(many * 2 * ROWS, columns, kind, one.form), weight_of(many * columns, ROWS, kind, one.form)
    mixture = experts.moe_pack(gate_up, down, many, ())
    chosen, shares = torch.zeros(count, top, dtype=torch.int32), torch.zeros(count, top)
    first, narrow, parts = (torch.zeros(pairs, width, dtype=kind) for width in (2 * ROWS, ROWS, columns))
    index = torch.zeros(4 * (pairs + many), dtype=torch.int32)
    experts.moe(torch.empty_like(x), first, narrow, parts, index, x, chosen, shares, mixture, "silu")
    for size in HIDDEN:
        row, ones = torch.zeros(1, size, dtype=kind), torch.ones(size)
        norm.rms_norm(row, row, ones, 1e-6)
        norm.add_rms_norm(row, row, row, ones, 1e-6)
        norm.layer_norm(row, row, ones, ones, 1e-6)
