"""Bits of native kernels: a row depends on itself alone, whatever else is in the batch, however it was cut, on any threads."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from vllm_core.api import OPS, KVGroupSpec
from vllm_core.ops.batch_inputs import sample as sample_inputs
from vllm_cpu import native_kv


@pytest.fixture(params=[1, 2, 5])
def threads(request, library):
    library.vllm_ops_set_threads(request.param)
    yield request.param
    library.vllm_ops_set_threads(0)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape_class", ["mixed", "gqa", "long", "mixed/kv_int8", "decode/kv_bfloat16/window", "long/sinks"])
def test_a_row_of_attention_does_not_depend_on_its_neighbours(shape_class, seed, threads, native_provider) -> None:
    generated = OPS["paged_attention"].load_generator()("float32", seed, shape_class)
    arguments = [native_provider.realize(value) for value in generated]
    out, q, kv, starts, lengths, table, *rest = arguments
    attention = native_provider.ops["paged_attention"]
    attention(*arguments)
    for row, (begin, end) in enumerate(zip(starts.tolist(), starts.tolist()[1:], strict=False)):
        alone = torch.zeros_like(q[begin:end])
        own = torch.tensor([0, end - begin], dtype=torch.int32)
        attention(alone, q[begin:end], kv, own, lengths[row : row + 1], table[row : row + 1], *rest)
        assert torch.equal(alone, out[begin:end])


@pytest.mark.parametrize(("window", "cap"), [(0, 0.0), (100, 0.0), (300, 5.0)])
def test_a_prompt_has_the_same_bits_however_it_is_cut(window, cap, native_ops, library) -> None:
    """Whole, in chunks, token by token, and on one thread or several: spans and chunks of keys stay where they are."""
    torch.manual_seed(0)
    length, heads, kv_heads, size, block = 700, 6, 2, 32, 16
    group = KVGroupSpec(index=0, kind="full", layers=(0,), num_kv_heads=kv_heads, head_size=size)
    blocks = -(-length // block) + 1
    memory = torch.zeros(blocks, native_kv.kv_layout(group, "float32", block).block_bytes, dtype=torch.uint8)
    kv = native_ops["kv_bind"](memory, kv_heads, size, "float32", block)
    k, v = torch.randn(2, length, kv_heads, size)
    native_ops["kv_write"](kv, k, v, torch.arange(length) + block)
    q, table = torch.randn(length, heads, size), torch.arange(1, blocks, dtype=torch.int32)[None]

    def attend(begin: int, end: int) -> torch.Tensor:
        out, starts = torch.empty(end - begin, heads, size), torch.tensor([0, end - begin], dtype=torch.int32)
        lengths = torch.tensor([end], dtype=torch.int32)
        native_ops["paged_attention"](out, q[begin:end], kv, starts, lengths, table, end - begin, end, 0.2, window, cap)
        return out

    whole = attend(0, length)
    for count in (1, 2, 5):
        library.vllm_ops_set_threads(count)
        for cuts in ([0, 300, 700], [0, 1, 64, 65, 256, 257, 699, 700]):
            parts = [attend(begin, end) for begin, end in pairwise(cuts)]
            assert torch.equal(torch.cat(parts), whole), (count, cuts)
        for token in (0, 63, 64, 255, 256, 511, 512, 699):
            assert torch.equal(attend(token, token + 1), whole[token : token + 1]), (count, token)
    library.vllm_ops_set_threads(0)


@pytest.mark.parametrize("seed", range(4))
def test_a_sampled_row_does_not_depend_on_its_neighbours(seed, threads, native_ops) -> None:
    tokens, flags, logits, state, slots, lengths, features = sample_inputs("float32", seed, "long")
    native_ops["sample"](tokens, flags, logits, state, slots, lengths, features)
    adjusted = logits.clone()
    native_ops["logit_adjust"](adjusted, state, slots, lengths, features)
    for row in range(len(logits)):
        one = slice(row, row + 1)
        token, flag, alone = tokens[one].clone().fill_(-1), flags[one].clone(), logits[one].clone()
        native_ops["sample"](token, flag, logits[one], state, slots[one], lengths[one], features)
        assert token.item() == tokens[row].item()
        native_ops["logit_adjust"](alone, state, slots[one], lengths[one], features)
        torch.testing.assert_close(alone[0], adjusted[row], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("size", [576, 640, 4099])
def test_a_normed_row_does_not_depend_on_the_number_of_rows(size, threads, native_ops) -> None:
    x, weight = torch.randn(81, size), torch.rand(size)
    every = torch.empty_like(x)
    native_ops["rms_norm"](every, x, weight, 1e-5)
    for count in (1, 2, 3, 8, 17, 64):
        some = torch.empty(count, size)
        native_ops["rms_norm"](some, x[:count], weight, 1e-5)
        assert torch.equal(some, every[:count])


def test_the_uniform_number_is_that_of_the_specification(native_ops) -> None:
    """Two tokens of equal weight: the draw says on which side of a half the number is."""
    from vllm_core.ops.random import uniform

    tokens, flags, _, state, slots, lengths, _ = sample_inputs("float32", 0, "long")
    logits = torch.full((len(slots), 2), 0.25)
    state.params[:, 11:] = 0
    state.params[:, 11] = 1
    state.params.view(torch.float32)[:, 12] = 1.0
    native_ops["sample"](tokens, flags, logits, state, slots, lengths, 1)
    numbers = uniform(state.params[slots, 9], state.params[slots, 10], lengths)
    assert tokens[:, 0].tolist() == (numbers >= 0.5).int().tolist()
