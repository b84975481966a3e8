"""Ops as core calls them: each queues one launch. What takes place on the host is here, what the device does in `kernels`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_core.api import BatchState, StepInputs
from vllm_core.api import batch as layout
from vllm_toy import kernels
from vllm_toy.kernels import KV, Packed
from vllm_toy.runtime import kernel

embedding = kernel(kernels.embedding)
gather_rows = kernel(kernels.gather_rows)
rms_norm = kernel(kernels.rms_norm)
add_rms_norm = kernel(kernels.add_rms_norm)
gated_activation = kernel(kernels.gated_activation)
linear = kernel(kernels.linear)
kv_write = kernel(kernels.kv_write)
kv_copy = kernel(kernels.kv_copy)
kv_export = kernel(kernels.kv_export)
kv_import = kernel(kernels.kv_import)
paged_attention = kernel(kernels.paged_attention)
qk_norm_rope_kv_write = kernel(kernels.qk_norm_rope_kv_write)
batch_update = kernel(kernels.batch_update)
advance = kernel(kernels.advance)
logit_adjust = kernel(kernels.logit_adjust)
sample = kernel(kernels.sample)
_build_step = kernel(kernels.build_step)


def linear_pack(weight: Tensor, bias: Tensor | None, readers: Sequence[str]) -> Packed:
    """Keep the tensors: the device reads a weight along its rows, whoever else reads it."""
    return Packed(weight.t(), bias)


def kv_bind(memory: Tensor, num_kv_heads: int, head_size: int, dtype: str, tokens_per_block: int) -> KV:
    """View uint8 [num_blocks, block_bytes]."""
    blocks = memory.view(getattr(torch, dtype))
    return KV(blocks.view(len(memory), num_kv_heads, 2, tokens_per_block, head_size))


def build_step(state: BatchState, packed: Tensor, header: Sequence[int]) -> StepInputs:
    """Allocate the step's inputs, whose sizes the host knows, and launch what fills them."""
    rows, tokens, sampled = header[layout.H_SCHEDULED], header[layout.H_NUM_TOKENS], header[layout.H_NUM_SAMPLED]
    longest = header[layout.H_MAX_SEQ]

    def fresh(*size: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(size, dtype=dtype, device=packed.device)

    out = StepInputs(
        token_ids=fresh(tokens),
        positions=fresh(tokens),
        slots=fresh(rows),
        query_start=fresh(rows + 1),
        seq_lens=fresh(rows),
        sample_rows=fresh(sampled, dtype=torch.int64),
        sample_slots=fresh(sampled, dtype=torch.int64),
        sample_lengths=fresh(sampled),
        slot_mapping=tuple(fresh(tokens, dtype=torch.int64) for _ in state.block_tables),
        block_tables=tuple(fresh(rows, max(1, -(-longest // size))) for size in state.tokens_per_block),
        num_tokens=tokens,
        num_rows=rows,
        max_query_len=header[layout.H_MAX_QUERY],
        max_seq_len=longest,
    )
    _build_step(out, state, packed, tuple(header))
    return out
