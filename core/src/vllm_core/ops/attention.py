"""References: the family ``kv``, and attention without a cache.

Each token attends over rows gathered for it alone, in tiles of bounded size: nothing waits for the device, and
prefill and decode are one case. Clear and correct for any mix; not fast for long prompts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_core.ops.dtypes import KV_CODES, TORCH_DTYPES
from vllm_core.ops.norm import rms_norm
from vllm_core.ops.rope import rotary_embedding
from vllm_core.ops.rows import row_of_tokens

_TILE_ELEMENTS = 1 << 22
"""Elements of gathered keys in one tile: 16 MiB in float32."""


@dataclass(frozen=True, slots=True)
class KV:
    """The reference's view of one layer's blocks, laid out as `vllm_core.ops.layouts` says.

    blocks [num_blocks, 2 * tokens_per_block, Hk, D]: keys, then values. `narrow` is the dtype of the numbers in them, uint8
    of which are bytes of fp8. scales float32 [num_blocks, 2 * tokens_per_block, Hk] of int8, else None.
    """

    blocks: Tensor
    narrow: torch.dtype
    scales: Tensor | None
    tokens_per_block: int

    def put(self, block: Tensor, place: Tensor, heads: Tensor) -> None:
        """Store heads [N, Hk, D] at places of blocks, int64 [N]; values start at place tokens_per_block."""
        codes, scales = self.encode(heads)
        self.blocks[block, place] = codes
        if self.scales is not None and scales is not None:
            self.scales[block, place] = scales

    def get(self, block: Tensor, place: Tensor) -> Tensor:
        """Heads [..., Hk, D] at places of blocks; float32 where they are stored as codes."""
        scales = None if self.scales is None else self.scales[block, place]
        return self.decode(self.blocks[block, place], scales)

    def encode(self, heads: Tensor) -> tuple[Tensor, Tensor | None]:
        """Heads [..., D] as they are stored, and their scales [...]."""
        if self.narrow is torch.int8:
            largest = heads.float().abs().amax(-1)
            scales = torch.where(largest > 0, largest / 127, 1.0)
            return (heads.float() / scales.unsqueeze(-1)).round_().to(torch.int8), scales
        if self.blocks.dtype is torch.uint8:
            limit = torch.finfo(self.narrow).max
            return heads.float().clamp(-limit, limit).to(self.narrow).view(torch.uint8), None
        return heads.to(self.narrow), None

    def decode(self, codes: Tensor, scales: Tensor | None) -> Tensor:
        """The inverse of `encode`."""
        if scales is not None:
            return codes.float() * scales.unsqueeze(-1)
        return codes.view(self.narrow).float() if codes.dtype is torch.uint8 else codes


def kv_bind(memory: Tensor, num_kv_heads: int, head_size: int, dtype: str, tokens_per_block: int) -> KV:
    """View uint8 [num_blocks, block_bytes]."""
    places = 2 * tokens_per_block
    if dtype in TORCH_DTYPES:
        blocks = memory.view(TORCH_DTYPES[dtype]).view(len(memory), places, num_kv_heads, head_size)
        return KV(blocks, blocks.dtype, None, tokens_per_block)
    narrow = KV_CODES[dtype]
    size = places * num_kv_heads * head_size
    codes = memory[:, :size].view(len(memory), places, num_kv_heads, head_size)
    if narrow is not torch.int8:
        return KV(codes, narrow, None, tokens_per_block)
    scales = memory[:, size:].view(torch.float32).view(len(memory), places, num_kv_heads)
    return KV(codes.view(torch.int8), narrow, scales, tokens_per_block)


def kv_write(kv: KV, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    """Store each token's key and value; several tokens on the null block overwrite each other."""
    block = slot_mapping.div(kv.tokens_per_block, rounding_mode="floor")
    place = slot_mapping - block * kv.tokens_per_block
    kv.put(block, place, k)
    kv.put(block, place + kv.tokens_per_block, v)


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
    """Causal attention over the paged KV; see the specification for the masks."""
    num_tokens = q.shape[0]
    if not num_tokens:
        return
    token_row = row_of_tokens(query_start, num_tokens)
    remaining = query_start[1:][token_row] - torch.arange(num_tokens, device=q.device)
    position = (seq_lens[token_row] - remaining).long()
    span = min(max_seq_len, window) if window else max_seq_len
    first = (position - (span - 1)).clamp_(min=0)
    offsets = torch.arange(span, device=q.device)
    last_column = block_table.shape[1] - 1
    tile = max(1, _TILE_ELEMENTS // (span * kv.blocks[0, 0].numel()))
    for begin in range(0, num_tokens, tile):
        part = slice(begin, begin + tile)
        keys_at = first[part, None] + offsets
        visible = keys_at <= position[part, None]
        column = keys_at.div(kv.tokens_per_block, rounding_mode="floor").clamp_(max=last_column)
        block = block_table[token_row[part, None], column].long()
        place = keys_at % kv.tokens_per_block
        keys, values = kv.get(block, place), kv.get(block, place + kv.tokens_per_block)
        out[part] = _attend(q[part], keys, values, visible, scale, soft_cap, sinks)


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scale: float, soft_cap: float, sinks: Tensor | None
) -> Tensor:
    """q [C,Hq,D] over keys and values [C,L,Hk,D] where visible [C,L]; returns q's shape and dtype."""
    grouped = q.float().view(len(q), keys.shape[2], -1, q.shape[2])
    scores = torch.einsum("chgd,clhd->chgl", grouped, keys.float()) * scale
    if soft_cap:
        scores = torch.tanh(scores / soft_cap) * soft_cap
    hidden = ~visible
    scores = scores.masked_fill(hidden[:, None, None], float("-inf"))
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        column = sinks.view(scores.shape[1:3]).expand(scores.shape[:3]).unsqueeze(-1)
        weights = torch.cat((scores, column), -1).softmax(-1)[..., :-1]
    # What lies beyond a sequence may be another's rest, even NaN: weight 0 alone would not hide it.
    clean = values.float().masked_fill(hidden[:, :, None, None], 0.0)
    return torch.einsum("chgl,clhd->chgd", weights, clean).flatten(1, 2).to(q.dtype)


def kv_copy(kv: KV, source: Tensor, target: Tensor) -> None:
    """Copy whole blocks."""
    kv.blocks[target] = kv.blocks[source]
    if kv.scales is not None:
        kv.scales[target] = kv.scales[source]


def kv_export(out: Tensor, kv: KV, blocks: Tensor) -> None:
    """Write float32 [N,2,tokens_per_block,Hk,D]."""
    scales = None if kv.scales is None else kv.scales[blocks]
    out.copy_(kv.decode(kv.blocks[blocks], scales).view(out.shape))


def kv_import(kv: KV, blocks: Tensor, target: Tensor) -> None:
    """The inverse of `kv_export`."""
    codes, scales = kv.encode(blocks.flatten(1, 2))
    kv.blocks[target] = codes
    if kv.scales is not None and scales is not None:
        kv.scales[target] = scales


def qk_norm_rope_kv_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    positions: Tensor,
    cos_sin: Tensor | None,
    interleaved: bool,
    kv: KV,
    slot_mapping: Tensor,
) -> None:
    """The decomposition: norms where there are weights, rotation where there is a table, then the write."""
    if q_weight is not None:
        rms_norm(q, q, q_weight, eps)
    if k_weight is not None:
        rms_norm(k, k, k_weight, eps)
    if cos_sin is not None:
        rotary_embedding(q, k, positions, cos_sin, interleaved)
    kv_write(kv, k, v, slot_mapping)


def qk_norm_rope_attention(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    positions: Tensor,
    cos_sin: Tensor | None,
    interleaved: bool,
    kv: KV,
    slot_mapping: Tensor,
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
    """The decomposition: what the queries attend to is written first."""
    qk_norm_rope_kv_write(q, k, v, q_weight, k_weight, eps, positions, cos_sin, interleaved, kv, slot_mapping)
    masks = (max_query_len, max_seq_len, scale, window, soft_cap)
    paged_attention(out, q, kv, query_start, seq_lens, block_table, *masks, sinks)


def encoder_attention(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, query_start: Tensor, max_query_len: int, scale: float
) -> None:
    """Bidirectional attention within each row."""
    num_tokens = q.shape[0]
    if not num_tokens:
        return
    token_row = row_of_tokens(query_start, num_tokens)
    begin, end = query_start[token_row].long(), query_start[token_row + 1].long()
    offsets = torch.arange(max_query_len, device=q.device)
    tile = max(1, _TILE_ELEMENTS // (max_query_len * k[0].numel()))
    for start in range(0, num_tokens, tile):
        part = slice(start, start + tile)
        keys_at = begin[part, None] + offsets
        visible = keys_at < end[part, None]
        keys_at = keys_at.clamp(max=num_tokens - 1)
        out[part] = _attend(q[part], k[keys_at], v[keys_at], visible, scale, 0.0, None)
