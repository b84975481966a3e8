"""Reference: all layers of a dense decoder."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_core.api.stack import DecoderLayers
from vllm_core.ops.attention import qk_norm_rope_attention
from vllm_core.ops.linear import linear_add, rms_norm_gated_linear, rms_norm_linear


def decode_layers(
    residual: Tensor, layers: DecoderLayers, positions: Tensor, slot_mapping: Tensor, seq_lens: Tensor, block_table: Tensor
) -> bool:
    """Layer by layer, as `vllm_core.layers.decoder` has them. Always does it."""
    rows, heads, kv_heads, size = len(residual), layers.num_heads, layers.num_kv_heads, layers.head_size
    normed, delta = torch.empty_like(residual), torch.empty_like(residual)
    qkv = residual.new_empty(rows, (heads + 2 * kv_heads) * size)
    attended = residual.new_empty(rows, heads, size)
    wide = residual.new_empty(rows, 2 * layers.intermediate_size)
    narrow = residual.new_empty(rows, layers.intermediate_size)
    query_start = torch.arange(rows + 1, dtype=torch.int32, device=residual.device)
    longest = int(seq_lens.max())
    for layer in layers.layers:
        rms_norm_linear(qkv, normed, residual, layer.input_norm, layers.eps, layer.qkv)
        q, k, v = qkv.view(rows, -1, size).tensor_split((heads, heads + kv_heads), 1)
        head = (q, k, v, layer.q_norm, layer.k_norm, layers.eps, positions, layers.cos_sin, False, layer.kv, slot_mapping)
        qk_norm_rope_attention(attended, *head, query_start, seq_lens, block_table, 1, longest, layers.scale, 0, 0.0)
        linear_add(residual, delta, attended.flatten(1), layer.out)
        rms_norm_gated_linear(narrow, wide, normed, residual, layer.mlp_norm, layers.eps, layer.gate_up, layers.activation)
        linear_add(residual, delta, narrow, layer.down)
    return True
