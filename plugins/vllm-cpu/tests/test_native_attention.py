"""Prompts in bfloat16, which CPUs with AMX compute by its tiles, against float64, whatever is in slots that no row has."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from vllm_core.api import KVGroupSpec
from vllm_cpu import native_kv

HEADS, KV_HEADS, BLOCK = 6, 2, 16


def expected(q, k, v, before, scale, window, cap, sinks) -> torch.Tensor:
    """Attention of queries [n, heads, D] that follow `before` tokens, keys and values [L, kv_heads, D], in float64."""
    k, v = (x.double().repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    scores = torch.einsum("nhd,lhd->hnl", q.double(), k) * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    position, key = before + torch.arange(len(q))[:, None], torch.arange(len(k))[None]
    hidden = (key > position) | ((key <= position - window) if window else torch.zeros_like(key > position))
    scores.masked_fill_(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(HEADS, len(q), 1)), -1)
    weights = scores.softmax(-1)[..., : len(k)]
    return torch.einsum("hnl,lhd->nhd", weights, v)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("size", [32, 64, 128])
@pytest.mark.parametrize(
    ("queries", "length", "window", "cap", "sunk"),
    [
        (3, 3, 0, 0.0, False),
        (300, 300, 0, 0.0, False),
        (37, 333, 0, 0.0, True),
        (130, 700, 100, 0.0, False),
        (90, 90, 0, 5.0, True),
    ],
)
def test_prompts_in_bfloat16(kv_dtype, size, queries, length, window, cap, sunk, native_ops) -> None:
    torch.manual_seed(0)
    group = KVGroupSpec(index=0, kind="full", layers=(0,), num_kv_heads=KV_HEADS, head_size=size)
    blocks = -(-length // BLOCK) + 1
    # Every byte 0xff: a number that is none, in both dtypes.
    memory = torch.full((blocks, native_kv.kv_layout(group, kv_dtype, BLOCK).block_bytes), 0xFF, dtype=torch.uint8)
    kv = native_ops["kv_bind"](memory, KV_HEADS, size, kv_dtype, BLOCK)
    k, v = torch.randn(2, length, KV_HEADS, size).bfloat16()
    native_ops["kv_write"](kv, k, v, torch.arange(length) + BLOCK)
    q, table = torch.randn(queries, HEADS, size).bfloat16(), torch.arange(1, blocks, dtype=torch.int32)[None]
    out, starts, lengths = (
        torch.empty_like(q),
        torch.tensor([0, queries], dtype=torch.int32),
        torch.tensor([length], dtype=torch.int32),
    )
    sinks = torch.randn(HEADS) if sunk else None
    given = () if sinks is None else (sinks,)
    native_ops["paged_attention"](out, q, kv, starts, lengths, table, queries, length, size**-0.5, window, cap, *given)
    wanted = expected(q, k, v, length - queries, size**-0.5, window, cap, sinks)
    assert (out.double() - wanted).abs().max() < 1e-2 * wanted.abs().max()


@pytest.mark.parametrize("window", [0, 100])
def test_a_prompt_in_bfloat16_has_the_same_bits_in_large_chunks_and_on_any_threads(window, native_ops, library) -> None:
    """Tiles of a few rows, whose products are not rounded, apart."""
    torch.manual_seed(0)
    length, size = 700, 64
    group = KVGroupSpec(index=0, kind="full", layers=(0,), num_kv_heads=KV_HEADS, head_size=size)
    blocks = -(-length // BLOCK) + 1
    memory = torch.full((blocks, native_kv.kv_layout(group, "float16", BLOCK).block_bytes), 0xFF, dtype=torch.uint8)
    kv = native_ops["kv_bind"](memory, KV_HEADS, size, "float16", BLOCK)
    k, v = torch.randn(2, length, KV_HEADS, size).bfloat16()
    native_ops["kv_write"](kv, k, v, torch.arange(length) + BLOCK)
    q, table = torch.randn(length, HEADS, size).bfloat16(), torch.arange(1, blocks, dtype=torch.int32)[None]

    def attend(begin: int, end: int) -> torch.Tensor:
        out, starts = torch.empty_like(q[begin:end]), torch.tensor([0, end - begin], dtype=torch.int32)
        lengths = torch.tensor([end], dtype=torch.int32)
        native_ops["paged_attention"](out, q[begin:end], kv, starts, lengths, table, end - begin, end, 0.2, window, 0.0)
        return out

    whole = attend(0, length)
    for count in (1, 2, 5):
        library.vllm_ops_set_threads(count)
        for cuts in ([0, 300, 700], [0, 64, 257, 700], [0, 150, 690, 700]):
            parts = [attend(begin, end) for begin, end in pairwise(cuts)]
            assert torch.equal(torch.cat(parts), whole), (count, cuts)
    library.vllm_ops_set_threads(0)
