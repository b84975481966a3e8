"""Blocks in which a token's heads lie together (`vllm_triton.token_major`): the canonical layout, but for its dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class KV:
    """One layer: blocks [num_blocks, 2, tokens_per_block, Hk, D], its keys and values, and a scale of one for each."""

    blocks: Tensor
    keys: Tensor
    values: Tensor
    scale: Tensor


def kv_bind(memory: Tensor, num_kv_heads: int, head_size: int, dtype: str, tokens_per_block: int) -> KV:
    """View uint8 [num_blocks, block_bytes]."""
    blocks = memory.view(_DTYPES[dtype]).view(memory.shape[0], 2, tokens_per_block, num_kv_heads, head_size)
    scale = torch.ones(1, dtype=torch.float32, device=memory.device)
    return KV(blocks, blocks[:, 0], blocks[:, 1], scale)


def kv_copy(kv: KV, source: Tensor, target: Tensor) -> None:
    """Copy whole blocks, int64 [N] each."""
    kv.blocks[target] = kv.blocks[source]


def kv_export(out: Tensor, kv: KV, blocks: Tensor) -> None:
    """Write blocks as float32 [N,2,tokens_per_block,Hk,D]."""
    out.copy_(kv.blocks[blocks])


def kv_import(kv: KV, blocks: Tensor, target: Tensor) -> None:
    """The inverse of `kv_export`, rounded to the KV dtype."""
    kv.blocks[target] = blocks.to(kv.blocks.dtype)
