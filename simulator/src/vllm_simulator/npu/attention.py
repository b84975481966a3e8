"""Fused attention over the paged KV cache, in the layout TND."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from vllm_simulator.npu.dispatch import op, queue, rule
from vllm_simulator.npu.graphs import updatable

NAME = "npu::npu_fused_infer_attention_score"
MASK = 2048
IGNORED = {
    "dequant_scale1",
    "quant_scale1",
    "dequant_scale2",
    "quant_scale2",
    "quant_offset2",
    "antiquant_scale",
    "antiquant_offset",
    "key_antiquant_scale",
    "key_antiquant_offset",
    "value_antiquant_scale",
    "value_antiquant_offset",
    "query_padding_size",
    "kv_padding_size",
    "key_shared_prefix",
    "value_shared_prefix",
    "actual_shared_prefix_len",
    "query_rope",
    "key_rope",
    "key_rope_antiquant_scale",
    "pse_shift",
}
"""Arguments that an uncompressed, unquantised cache leaves out."""


@op(NAME)
def npu_fused_infer_attention_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    atten_mask: Tensor | None = None,
    actual_seq_lengths: Sequence[int] | None = None,
    actual_seq_lengths_kv: Sequence[int] | None = None,
    block_table: Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    pre_tokens: int = 2147483647,
    next_tokens: int = 2147483647,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    inner_precise: int = 0,
    block_size: int = 0,
    softmax_lse_flag: bool = False,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """Causal attention; actual_seq_lengths are running sums of queries, actual_seq_lengths_kv each row's own length."""
    given = [name for name in others if others[name] is not None and name in IGNORED]
    rule(not given and not softmax_lse_flag, f"not simulated: {', '.join(given) or 'softmax_lse_flag'}")
    rule(input_layout == "TND" and block_table is not None, f"layout {input_layout!r} without pages is not simulated")
    assert block_table is not None
    rule(actual_seq_lengths is not None and actual_seq_lengths_kv is not None, "TND with pages takes both lists of lengths")
    ends, lengths = list(actual_seq_lengths or ()), list(actual_seq_lengths_kv or ())
    _check_tensors(query, key, value, block_table, num_heads, num_key_value_heads, block_size)
    _check_lengths(query, key, block_table, ends, lengths, block_size)
    rule(sparse_mode in (0, 3), f"sparse_mode {sparse_mode} is not simulated")
    if sparse_mode == 3:
        fits = atten_mask is not None and tuple(atten_mask.shape)[-2:] == (MASK, MASK) and atten_mask.numel() == MASK * MASK
        rule(fits, f"sparse_mode 3 takes a mask of {MASK} x {MASK}")
        assert atten_mask is not None
        rule(atten_mask.dtype in (torch.bool, torch.int8, torch.uint8), f"the mask is {atten_mask.dtype}")
    else:
        rule(atten_mask is None, "sparse_mode 0 in TND takes no mask")
    # Without softmax_lse_flag the wheel's own Meta kernel says [0], its documentation [1].
    out, lse = torch.empty_like(query), query.new_empty(0, dtype=torch.float32)
    host = updatable({"actual_seq_lengths": ends, "actual_seq_lengths_kv": lengths})

    def body(out: Tensor, q: Tensor, k: Tensor, v: Tensor, table: Tensor, mask: Tensor | None) -> None:
        causal = mask is not None
        if mask is not None:
            rule(bool(mask.view(MASK, MASK)[0, 1]) and not bool(mask.view(MASK, MASK)[1, 0]), "the mask is an upper triangle")
        ends, lengths = host["actual_seq_lengths"], host["actual_seq_lengths_kv"]
        _check_lengths(q, k, table, ends, lengths, block_size)
        starts = [0, *ends]
        for row, (begin, end) in enumerate(pairwise(starts)):
            blocks = table[row, : -(-lengths[row] // block_size)].long()
            keys, values = (
                cache.view(len(cache), block_size, num_key_value_heads, -1)[blocks].flatten(0, 1)[: lengths[row]].float()
                for cache in (k, v)
            )
            out[begin:end] = _attend(q[begin:end].float(), keys, values, scale, causal).to(out.dtype)

    queue(NAME, body, out, query, key, value, block_table, atten_mask)
    return out, lse


def _attend(q: Tensor, keys: Tensor, values: Tensor, scale: float, causal: bool) -> Tensor:
    count, length = len(q), len(keys)
    grouped = q.view(count, keys.shape[1], -1, q.shape[-1])
    scores = torch.einsum("thgd,lhd->hgtl", grouped, keys) * scale
    if causal:
        position = torch.arange(length - count, length)[:, None]
        scores = scores.masked_fill(torch.arange(length) > position, float("-inf"))
    return torch.einsum("hgtl,lhd->thgd", scores.softmax(-1), values).flatten(1, 2)


def _check_tensors(
    query: Tensor, key: Tensor, value: Tensor, block_table: Tensor, num_heads: int, kv_heads: int, block_size: int
) -> None:
    rule(query.dtype in (torch.float16, torch.bfloat16), f"query is {query.dtype}: float16 or bfloat16")
    rule(query.dtype == key.dtype == value.dtype, f"dtypes {query.dtype}, {key.dtype}, {value.dtype}")
    rule(query.is_contiguous() and key.is_contiguous() and value.is_contiguous(), "query, key and value are contiguous")
    rule(query.dim() == 3 and query.shape[1] == num_heads, f"query is [T, {num_heads}, D], not {tuple(query.shape)}")
    size = query.shape[2]
    rule(size % 16 == 0 and size <= 512 and num_heads <= 256, f"D a multiple of 16 up to 512, N up to 256: {size}, {num_heads}")
    rule(kv_heads > 0 and num_heads % kv_heads == 0, f"{num_heads} heads over {kv_heads}")
    rule(128 <= block_size <= 512 and block_size % 128 == 0, f"block_size {block_size}: 128 to 512, a multiple of 128")
    rule(
        key.dim() == 3 and tuple(key.shape[1:]) == (block_size, kv_heads * size),
        f"key {tuple(key.shape)} is not (blocks, block, KV_N * D)",
    )
    rule(key.shape == value.shape and kv_heads * size <= 65535, f"value {tuple(value.shape)}; KV_N * D is at most 65535")
    rule(
        block_table.dtype == torch.int32 and block_table.dim() == 2,
        f"block_table is {block_table.dtype}, {block_table.dim()}-D",
    )


def _check_lengths(
    query: Tensor, key: Tensor, block_table: Tensor, ends: list[int], lengths: list[int], block_size: int
) -> None:
    rule(
        len(ends) == len(lengths) == block_table.shape[0], f"{len(ends)} and {len(lengths)} rows, {block_table.shape[0]} tables"
    )
    rule(
        bool(ends) and ends[-1] == query.shape[0] and ends == sorted(ends),
        f"running sums end with T = {query.shape[0]}: {ends}",
    )
    counts = [end - begin for begin, end in pairwise([0, *ends])]
    rule(all(count <= length for count, length in zip(counts, lengths, strict=True)), "no more queries than keys in a row")
    blocks = [-(-length // block_size) for length in lengths]
    rule(max(blocks) <= block_table.shape[1], f"a row has {max(blocks)} blocks, its table {block_table.shape[1]}")
    rule(sum(blocks) <= key.shape[0], f"{sum(blocks)} blocks in use, {key.shape[0]} there")
