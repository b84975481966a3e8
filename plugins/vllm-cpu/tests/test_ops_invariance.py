"""The claim batch_invariant: in float32 a row's result is the same bits whatever else is in the batch."""

from __future__ import annotations

import pytest
import torch

from vllm_core.api import OPS
from vllm_core.ops import check, inputs, norm
from vllm_core.ops.batch_inputs import StepRecipe
from vllm_core.ops.batch_inputs import sample as sample_inputs


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize(("outputs", "size"), [(1536, 576), (576, 1536), (577, 640), (4096, 257)])
def test_a_row_of_a_product_does_not_depend_on_the_number_of_rows(outputs, size, threads, own_ops) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(130, size), torch.randn(outputs, size) / size**0.5
    packed = own_ops["linear_pack"](weight, torch.randn(outputs), ())
    every = torch.empty(130, outputs)
    own_ops["linear"](every, x, packed)
    for count in (*range(1, 81), 127, 130):
        some = torch.empty(count, outputs)
        own_ops["linear"](some, x[130 - count :], packed)
        assert torch.equal(some, every[130 - count :]), count


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shape_class", ["mixed", "gqa", "long", "mixed/sinks"])
def test_a_row_of_attention_does_not_depend_on_its_neighbours(shape_class, seed, threads, provider) -> None:
    arguments = [provider.realize(value) for value in OPS["paged_attention"].load_generator()("float32", seed, shape_class)]
    out, q, kv, starts, lengths, table, *rest = arguments
    provider.ops["paged_attention"](*arguments)
    for row, (begin, end) in enumerate(zip(starts.tolist(), starts.tolist()[1:], strict=False)):
        alone = torch.zeros_like(q[begin:end])
        own = torch.tensor([0, end - begin], dtype=torch.int32)
        provider.ops["paged_attention"](alone, q[begin:end], kv, own, lengths[row : row + 1], table[row : row + 1], *rest)
        assert torch.equal(alone, out[begin:end])


def test_attention_never_reads_the_rest_of_a_block(provider) -> None:
    content = inputs.KVContent(torch.full((3, 2, 4, 1, 8), float("nan")), "float32")
    kv = provider.realize(content)
    k = torch.ones(2, 1, 8)
    provider.ops["kv_write"](kv, k, k * 3, torch.tensor([4, 5]))
    out, starts = torch.zeros(1, 1, 8), torch.tensor([0, 1], dtype=torch.int32)
    lengths, table = torch.tensor([2], dtype=torch.int32), torch.tensor([[1, 0]], dtype=torch.int32)
    provider.ops["paged_attention"](out, k[:1], kv, starts, lengths, table, 1, 8, 1.0, 0, 0.0)
    torch.testing.assert_close(out, torch.full_like(out, 3.0))


@pytest.mark.parametrize("seed", range(6))
def test_a_sampled_row_does_not_depend_on_its_neighbours(seed, own_ops) -> None:
    tokens, flags, logits, state, slots, lengths, features = sample_inputs("float32", seed, "long")
    own_ops["sample"](tokens, flags, logits, state, slots, lengths, features)
    adjusted = logits.clone()
    own_ops["logit_adjust"](adjusted, state, slots, lengths, features)
    for row in range(len(logits)):
        one = slice(row, row + 1)
        token, flag, alone = tokens[one].clone().fill_(-1), flags[one].clone(), logits[one].clone()
        own_ops["sample"](token, flag, logits[one], state, slots[one], lengths[one], features)
        assert token.item() == tokens[row].item()
        own_ops["logit_adjust"](alone, state, slots[one], lengths[one], features)
        torch.testing.assert_close(alone[0], adjusted[row], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("size", [576, 640, 4096])
def test_a_normed_row_does_not_depend_on_the_number_of_rows(size, threads) -> None:
    x, weight = torch.randn(81, size), torch.rand(size)
    every = torch.empty_like(x)
    norm.rms_norm(every, x, weight, 1e-5)
    for count in (1, 2, 3, 8, 17, 64):
        some = torch.empty(count, size)
        norm.rms_norm(some, x[:count], weight, 1e-5)
        assert torch.equal(some, every[:count])


def test_random_numbers_are_those_of_the_specification() -> None:
    from vllm_core.ops.random import uniform as reference
    from vllm_cpu.ops.philox import uniform

    words = torch.randint(-(2**31), 2**31, (3, 40), generator=torch.Generator().manual_seed(0)).int()
    expected = reference(*words).numpy()
    for count in (1, 8, 9, 40):
        assert (uniform(*(row.numpy()[:count] for row in words)) == expected[:count]).all()


def test_views_follow_the_state_they_were_made_for(own_ops) -> None:
    states = [StepRecipe(seed, "mixed").state() for seed in range(12)]
    for state in states * 2:
        own_ops["batch_update"](state, *StepRecipe(3, "mixed").arguments())
    fresh = check.reference()
    for seed, state in enumerate(states):
        expected = StepRecipe(seed, "mixed").state()
        fresh.ops["batch_update"](expected, *StepRecipe(3, "mixed").arguments())
        assert torch.equal(state.tokens, expected.tokens)
