"""Attention of prompts on Hopper (`kernels/extend.cu`): its offers, and where it takes over. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from vllm_core.api import CallSite, Offer, Rejected, Verdict
from vllm_cuda.backends.hopper import PROGRAMS
from vllm_cuda.extend_tiles import LINES, Tile

BLOCK_SIZES = frozenset({16, 32, 64, 128, 256})
"""Tokens of a block that are whole boxes of a tile of keys, or of which such a tile is a part."""

TILES = {128: (Tile(2, 128, 2), Tile(2, 128, 2, split=True)), 64: (Tile(2, 128, 3), Tile(2, 128, 2, split=True))}
"""By head size: of steps that have tiles for most multiprocessors, and of those that have them for half of them at most."""

LEAST_TOKENS, LEAST_PAIRS = 64, {128: 8 << 10, 64: 40 << 10}
"""Of a step, and, by head size, of them and the keys that each may see: this kernel takes a microsecond longer to begin."""


def attended(tokens: int, keys: int, heads: int, kv_heads: int, head_size: int, multiprocessors: int) -> Tile | None:
    """Tile of `vllm_cuda.extend` for a step of so many tokens that see ``keys`` at most, ``heads`` a KV head; None where
    nothing was measured.

    Measured on an H200 on one layer's attention in bfloat16, blocks of 64 tokens, with that of single queries where there are
    several rows, in microseconds, by this kernel and by the shared one. Qwen3 8B, four prompts of 2,048 tokens: 236, 377; one
    of 8,192: 869, 1,366; 14 of 585: 107, 177; a chunk of 512 after 3,500: 54, 79; two of 2,048 beside 64 single queries: 186,
    251. A rank of eight of a model of 64 and 8 heads, the same: 61, 89; 202, 298; 34, 52; split 33, 51; 56, 67. 32 and 8 heads
    of 64: 170, 186; 599, 635; 74, 87; 43, 51; 130, 137. A chunk of 256 after 1,000, split: 15.5, 20 and 12, 14.9.

    With windows and sinks, the same: gpt-oss, 64 and 8 heads of 64, a window of 128: 113, 162; 116, 159; 109, 158; 12.8, 14.6;
    76, 99; without a window: 345, 367; 1,334, 1,360; 147, 171; 81, 86; 219, 229. Heads of 128: 32 and 8, 512: 139, 226; 145,
    238; 110, 183; 16, 19; 113, 160; 32 and 16, 1,024: 202, 304; 227, 358; 121, 197; 23, 29; 230, 288. Below `LEAST_PAIRS`: 64
    tokens 6.4, 5.5 (128), 4.6, 3.7 (64); gpt-oss's 256 after 1,000 in the window 9.1, 7.9.
    """
    if tokens < LEAST_TOKENS or head_size not in TILES or heads > LINES or multiprocessors != PROGRAMS:
        return None
    if tokens * keys < LEAST_PAIRS[head_size]:
        return None
    whole, split = TILES[head_size]
    tiles = -(-tokens // (whole.groups * (LINES // heads))) * kv_heads
    return split if 2 * tiles <= PROGRAMS else whole


def offers(provider: str, shared: Sequence[Offer], accepts: Callable[[CallSite], Verdict]) -> Sequence[Offer]:
    """Those of ``shared`` for attention, where this kernel takes prompts; each goes before the one that it is made of."""
    mine = {name: f"vllm_cuda.attention:{name}" for name in ("paged_attention", "qk_norm_rope_attention")}
    return tuple(
        replace(
            one,
            provider=one.provider.replace(shared[0].provider, provider),
            ops={**one.ops, **mine},
            dtypes=frozenset({"bfloat16", "float16"}),
            kv_dtypes=frozenset({"bfloat16", "float16"}),
            head_sizes=frozenset(TILES),
            block_sizes=(one.block_sizes or frozenset()) & BLOCK_SIZES,
            features=frozenset({"interleaved", "sliding_window", "sinks"}),
            priority=one.priority + 5,
            accepts=same_dtype(accepts),
        )
        for one in shared
        if "paged_attention" in one.ops
    )


def same_dtype(accepts: Callable[[CallSite], Verdict]) -> Callable[[CallSite], Verdict]:
    """``accepts`` of call sites whose cache is in the model's dtype."""

    def accept(site: CallSite) -> Verdict:
        if site.kv_dtype not in (None, site.dtype):
            return Rejected("kv dtype", str(site.kv_dtype), f"that of the model, {site.dtype}")
        return accepts(site)

    return accept
