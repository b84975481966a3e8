"""Prompts in bfloat16, by the tiles of AMX or by products of words, against float64, whatever is in slots that no row has."""

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


class Prompt:
    """Keys and values [length, KV_HEADS, size] of one sequence in a cache, to be attended by its last tokens."""

    def __init__(self, ops, k, v, kv_dtype) -> None:
        self.ops, (length, heads, self.size) = ops, k.shape
        group = KVGroupSpec(index=0, kind="full", layers=(0,), num_kv_heads=heads, head_size=self.size)
        blocks = -(-length // BLOCK) + 1
        # Every byte 0xff: a number that is none, in both dtypes.
        memory = torch.full((blocks, native_kv.kv_layout(group, kv_dtype, BLOCK).block_bytes), 0xFF, dtype=torch.uint8)
        self.kv = ops["kv_bind"](memory, heads, self.size, kv_dtype, BLOCK)
        ops["kv_write"](self.kv, k, v, torch.arange(length) + BLOCK)
        self.table = torch.arange(1, blocks, dtype=torch.int32)[None]

    def attend(self, q, length, *, scale=None, window=0, cap=0.0, sinks=None) -> torch.Tensor:
        """Attention of q [n, HEADS, size], the last tokens of the first `length`."""
        out, count = torch.empty_like(q), len(q)
        starts, lengths = torch.tensor([0, count], dtype=torch.int32), torch.tensor([length], dtype=torch.int32)
        given = (count, length, scale or self.size**-0.5, window, cap, *(() if sinks is None else (sinks,)))
        self.ops["paged_attention"](out, q, self.kv, starts, lengths, self.table, *given)
        return out


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("size", [32, 64, 80, 128, 192])
@pytest.mark.parametrize(
    ("queries", "length", "window", "cap", "sunk"),
    [
        (3, 3, 0, 0.0, False),
        (300, 300, 0, 0.0, False),
        (37, 333, 0, 0.0, True),
        (9, 41, 0, 0.0, False),
        (130, 700, 100, 0.0, False),
        (90, 90, 0, 5.0, True),
    ],
)
def test_prompts_in_bfloat16(kv_dtype, size, queries, length, window, cap, sunk, native_ops) -> None:
    torch.manual_seed(0)
    k, v = torch.randn(2, length, KV_HEADS, size).bfloat16()
    q = torch.randn(queries, HEADS, size).bfloat16()
    sinks = torch.randn(HEADS) if sunk else None
    out = Prompt(native_ops, k, v, kv_dtype).attend(q, length, window=window, cap=cap, sinks=sinks)
    wanted = expected(q, k, v, length - queries, size**-0.5, window, cap, sinks)
    assert (out.double() - wanted).abs().max() < 1e-2 * wanted.abs().max()


@pytest.mark.parametrize("window", [0, 100])
def test_a_prompt_in_bfloat16_has_the_same_bits_in_large_chunks_and_on_any_threads(window, native_ops, library) -> None:
    """Tiles of a few rows, whose products are not rounded, apart."""
    torch.manual_seed(0)
    length, size = 700, 64
    k, v = torch.randn(2, length, KV_HEADS, size).bfloat16()
    q, prompt = torch.randn(length, HEADS, size).bfloat16(), Prompt(native_ops, k, v, "float16")
    whole = prompt.attend(q, length, scale=0.2, window=window)
    for count in (1, 2, 5):
        library.vllm_ops_set_threads(count)
        for cuts in ([0, 300, 700], [0, 64, 257, 700], [0, 150, 690, 700]):
            parts = [prompt.attend(q[begin:end], end, scale=0.2, window=window) for begin, end in pairwise(cuts)]
            assert torch.equal(torch.cat(parts), whole), (count, cuts)
    library.vllm_ops_set_threads(0)


@pytest.mark.parametrize("number", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("where", ["key", "value"])
def test_what_is_not_finite_reaches_the_rows_that_see_it(where, number, native_ops) -> None:
    torch.manual_seed(0)
    length, size, bad, own = 300, 64, 200, HEADS // KV_HEADS
    k, v = torch.randn(2, length, KV_HEADS, size).bfloat16()
    (k if where == "key" else v)[bad, 0, 5] = number
    q = torch.randn(length, HEADS, size).bfloat16()
    out = Prompt(native_ops, k, v, "bfloat16").attend(q, length)
    assert torch.isfinite(out[:, own:]).all(), "the other head has nothing of it"
    # A value that is hidden from a row has the weight zero, which makes NaN of it for rows just before.
    assert torch.isfinite(out[: bad if where == "key" else bad - 64]).all()
    seen = ~torch.isfinite(expected(q, k, v, 0, size**-0.5, 0, 0.0, None)[bad:, :own]).all(-1)
    assert not torch.isfinite(out[bad:, :own]).all(-1)[seen].any()
