"""Writes to the paged KV cache, and scattered updates."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_simulator.npu.dispatch import op, queue, rule


@op("atb::_npu_reshape_and_cache")
def _npu_reshape_and_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_indices: Tensor) -> None:
    """Store key and value [T, N, D] at slots int32 [T] of caches [blocks, block, N, D]."""
    for one, cached in ((key, key_cache), (value, value_cache)):
        rule(one.dim() == 3 and cached.dim() == 4 and one.shape[1:] == cached.shape[2:], "[T, N, D] into [blocks, block, N, D]")
        rule(one.dtype == cached.dtype and one.dtype in (torch.float16, torch.bfloat16, torch.int8), f"dtype {one.dtype}")
        rule(one.is_contiguous() and cached.is_contiguous(), "tensors are contiguous")
    rule(slot_indices.dtype == torch.int32 and tuple(slot_indices.shape) == (key.shape[0],), "slot_indices is int32 [T]")

    def body(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        rows = slots.long()
        keys.view(-1, *keys.shape[2:])[rows] = key
        values.view(-1, *values.shape[2:])[rows] = value

    queue("atb::_npu_reshape_and_cache", body, key, value, key_cache, value_cache, slot_indices)


@op("npu::npu_scatter_nd_update_")
def npu_scatter_nd_update_(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """input[indices] = updates; indices have at least two dimensions, the last addresses input's first ones."""
    rule(indices.dim() >= 2 and indices.dtype in (torch.int32, torch.int64), "indices have at least two dimensions")
    rule(input.dtype == updates.dtype, f"dtypes {input.dtype} and {updates.dtype}")
    depth = indices.shape[-1]
    rule(tuple(updates.shape) == (*indices.shape[:-1], *input.shape[depth:]), "updates fit indices and input")

    def body(input: Tensor, indices: Tensor, updates: Tensor) -> None:
        input[tuple(indices.long().unbind(-1))] = updates

    queue("npu::npu_scatter_nd_update_", body, input, indices, updates)
    return input
