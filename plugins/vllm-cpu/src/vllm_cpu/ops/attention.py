"""Attention on the host, one row (sequence) after the other through torch's fused attention, in float32.

A row is computed from its own blocks and exactly its own length, so its result does not depend on what else is in the
batch, and what a block's unwritten end holds is never read. Oracle: `vllm_core.ops.attention`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from vllm_cpu.ops.cache import KV
from vllm_cpu.recording import recorded

QUERY_TILE = 256
"""Queries computed at once: bounds the mask, and skips keys that lie after the tile."""


@dataclass(frozen=True, slots=True)
class Masks:
    """What a call of attention makes of its scores; a window or a soft cap of 0 is none."""

    scale: float
    window: int = 0
    soft_cap: float = 0.0
    sinks: Tensor | None = None


@recorded
def paged_attention(
    out: Tensor,
    q: Tensor,
    kv: KV,
    query_start: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    window: int,
    soft_cap: float,
    sinks: Tensor | None = None,
) -> None:
    """Causal attention over the paged KV: q and out [T,Hq,D], int32 block_table [S,B], float32 sinks [Hq]."""
    starts, lengths = query_start.tolist(), seq_lens.tolist()
    key_halves = block_table * 2
    size, masks = kv.tokens_per_block, Masks(scale, window, soft_cap, sinks)
    for row, length in enumerate(lengths):
        begin, end = starts[row], starts[row + 1]
        if begin == end:
            continue
        first = _first_key(length - (end - begin), window)
        skipped = first // size
        halves = key_halves[row, skipped : -(-length // size)]
        part = slice(first - skipped * size, length - skipped * size)
        keys = kv.halves.index_select(0, halves).flatten(0, 1)[part].float()
        values = kv.halves.index_select(0, halves + 1).flatten(0, 1)[part].float()
        _row(out[begin:end], q[begin:end], keys, values, first, length, masks)


def _first_key(position: int, window: int) -> int:
    return max(0, position - window + 1) if window else 0


def _row(out: Tensor, q: Tensor, keys: Tensor, values: Tensor, first: int, length: int, masks: Masks) -> None:
    """Queries [n,Hq,D] are the last of ``length`` tokens; keys and values [L,Hk,D] begin at position ``first``."""
    count, window = q.shape[0], masks.window
    if count == 1:
        out.copy_(_attend(q, keys, values, None, masks))
        return
    for begin in range(0, count, QUERY_TILE):
        tile = slice(begin, min(begin + QUERY_TILE, count))
        low, high = length - count + tile.start, length - count + tile.stop
        seen = slice(_first_key(low, window) - first if window else 0, high - first)
        queries = torch.arange(low, high)[:, None]
        positions = torch.arange(first + seen.start, high)
        mask = positions <= queries
        if window:
            mask &= positions > queries - window
        out[tile] = _attend(q[tile], keys[seen], values[seen], mask, masks)


def _attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, masks: Masks) -> Tensor:
    """q [n,Hq,D] over [L,Hk,D], mask [n,L]; query heads of one KV head are a group that shares it without a copy."""
    count, num_heads, head_size = q.shape
    num_kv = keys.shape[1]
    grouped = q.float().view(count, num_kv, num_heads // num_kv, head_size)
    scale = masks.scale
    if masks.soft_cap or masks.sinks is not None:
        return _scored(grouped, keys, values, mask, masks).reshape(q.shape)
    if count == 1:
        result = scaled_dot_product_attention(
            grouped, keys.transpose(0, 1).unsqueeze(0), values.transpose(0, 1).unsqueeze(0), scale=scale
        )
        return result.reshape(q.shape)
    shape = (num_kv, num_heads // num_kv, keys.shape[0], head_size)
    result = scaled_dot_product_attention(
        grouped.permute(1, 2, 0, 3),
        keys.transpose(0, 1).unsqueeze(1).expand(shape),
        values.transpose(0, 1).unsqueeze(1).expand(shape),
        attn_mask=mask,
        scale=scale,
    )
    return result.permute(2, 0, 1, 3).reshape(q.shape)


def _scored(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, masks: Masks) -> Tensor:
    """The same with a tanh cap on the scores, or sinks, which torch's fused attention does not have; q [n,Hk,G,D]."""
    heads, cap = q.permute(1, 2, 0, 3), masks.soft_cap
    scores = torch.matmul(heads, keys.permute(1, 2, 0).unsqueeze(1)).mul_(masks.scale / cap if cap else masks.scale)
    if cap:
        scores.tanh_().mul_(cap)
    if mask is not None:
        scores.masked_fill_(~mask, float("-inf"))
    if masks.sinks is None:
        weights = scores.softmax(-1)
    else:
        column = masks.sinks.view(*scores.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat((scores, column), -1).softmax(-1)[..., :-1]
    return torch.matmul(weights, values.transpose(0, 1).unsqueeze(1)).permute(2, 0, 1, 3)


@recorded
def encoder_attention(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, query_start: Tensor, max_query_len: int, scale: float
) -> None:
    """Bidirectional attention within each row: q and out [T,Hq,D], k and v [T,Hk,D]."""
    starts = query_start.tolist()
    for begin, end in pairwise(starts):
        if begin != end:
            out[begin:end] = _bidirectional(q[begin:end], k[begin:end].float(), v[begin:end].float(), scale)


def _bidirectional(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    num_kv = keys.shape[1]
    shape = (num_kv, q.shape[1] // num_kv, *keys.shape[::2])
    result = scaled_dot_product_attention(
        q.float().view(len(q), num_kv, -1, q.shape[2]).permute(1, 2, 0, 3),
        keys.transpose(0, 1).unsqueeze(1).expand(shape),
        values.transpose(0, 1).unsqueeze(1).expand(shape),
        scale=scale,
    )
    return result.permute(2, 0, 1, 3).reshape(q.shape)
