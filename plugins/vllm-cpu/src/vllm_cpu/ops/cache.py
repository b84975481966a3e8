"""The paged KV cache on the host: a view of the blocks, writes, copies, export and import.

A block is contiguous: its keys [tokens_per_block, Hk, D], then its values. Oracle: `vllm_core.ops.attention`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_cpu.recording import recorded


@dataclass(frozen=True, slots=True)
class KV:
    """One layer's blocks, three views of one memory.

    blocks [num_blocks, 2, tokens_per_block, Hk, D]; halves [num_blocks * 2, tokens_per_block, Hk, D], keys of block b at
    2 b, values at 2 b + 1; rows [num_blocks * 2 * tokens_per_block, Hk, D].
    """

    blocks: Tensor
    halves: Tensor
    rows: Tensor
    tokens_per_block: int


def kv_bind(memory: Tensor, num_kv_heads: int, head_size: int, dtype: str, tokens_per_block: int) -> KV:
    """View uint8 [num_blocks, block_bytes]."""
    blocks = memory.view(getattr(torch, dtype)).view(memory.shape[0], 2, tokens_per_block, num_kv_heads, head_size)
    return KV(blocks, blocks.flatten(0, 1), blocks.view(-1, num_kv_heads, head_size), tokens_per_block)


@recorded
def kv_write(kv: KV, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    """Store [T,Hk,D] at int64 [T] slots."""
    size = kv.tokens_per_block
    at = slot_mapping + slot_mapping.div(size, rounding_mode="floor") * size
    kv.rows.index_copy_(0, at, k.to(kv.rows.dtype))
    kv.rows.index_copy_(0, at + size, v.to(kv.rows.dtype))


@recorded
def kv_copy(kv: KV, source: Tensor, target: Tensor) -> None:
    """Copy whole blocks."""
    kv.blocks.index_copy_(0, target, kv.blocks.index_select(0, source))


@recorded
def kv_export(out: Tensor, kv: KV, blocks: Tensor) -> None:
    """Write float32 [N,2,tokens_per_block,Hk,D]."""
    out.copy_(kv.blocks.index_select(0, blocks))


@recorded
def kv_import(kv: KV, blocks: Tensor, target: Tensor) -> None:
    """The inverse of `kv_export`."""
    kv.blocks.index_copy_(0, target, blocks.to(kv.blocks.dtype))
