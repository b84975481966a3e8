"""The tail's references: random numbers, distributions, penalties, masks."""

from __future__ import annotations

import struct

import pytest
import torch

from vllm_core.api import batch as layout
from vllm_core.ops import random as numbers
from vllm_core.ops import sampling
from vllm_core.ops.batch_inputs import empty_state


def _bits(value: float) -> int:
    return struct.unpack("<i", struct.pack("<f", value))[0]


def _state(rows, **columns):
    """A state whose slots 0 .. rows-1 have these parameters; floats are given as floats."""
    state = empty_state(rows)
    values = {"A_TEMPERATURE": 1.0, "A_TOP_P": 1.0, "A_REPETITION": 1.0, **columns}
    for name, value in values.items():
        state.params[:rows, getattr(layout, name)] = _bits(value) if isinstance(value, float) else value
    return state


def _sample(logits, state, lengths, features):
    rows = len(logits)
    tokens, flags = torch.zeros(rows, 1, dtype=torch.int32), torch.zeros(rows, dtype=torch.bool)
    sampling.sample(tokens, flags, logits, state, torch.arange(rows), lengths, features)
    return tokens[:, 0], flags


# Random123's published answers for philox4x32-10.
@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_words(counter, key, words) -> None:
    got = numbers.philox(tuple(torch.tensor([c]) for c in counter), tuple(torch.tensor([k]) for k in key))
    assert tuple(int(word) for word in got) == words


def test_random_numbers_are_uniform_and_depend_on_every_word() -> None:
    at = torch.arange(20000)
    u = numbers.uniform(torch.zeros_like(at), torch.zeros_like(at), at)
    assert float(u.min()) >= 0
    assert float(u.max()) < 1
    counts = torch.histc(u.float(), 50, 0, 1)
    assert float(((counts - 400) ** 2 / 400).sum()) < 100
    one = torch.ones_like(at)
    assert not torch.equal(u, numbers.uniform(one, 0 * one, at))
    assert not torch.equal(u, numbers.uniform(0 * one, one, at))


def _expected(logits, top_k, top_p, min_p):
    """The distribution in plain Python, for logits without ties."""
    order = sorted(range(len(logits)), key=lambda i: -float(logits[i]))
    kept = order[:top_k] if top_k else order
    weights = {i: float(logits[i].double().exp()) for i in kept}
    total, mass, nucleus = sum(weights.values()), 0.0, []
    for i in kept:
        nucleus.append(i)
        mass += weights[i] / total
        if mass >= top_p:
            break
    final = {i: weights[i] for i in nucleus if weights[i] >= min_p * weights[kept[0]]}
    return {i: w / sum(final.values()) for i, w in final.items()}


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.7, 0.0), (8, 0.9, 0.1), (0, 1e-6, 0.0)]
)
def test_sampled_frequencies_follow_the_distribution(top_k, top_p, min_p) -> None:
    rows, generator = 4000, torch.Generator().manual_seed(3)
    logits = torch.randn(12, generator=generator) * 1.5
    state = _state(rows, A_TOP_K=top_k, A_TOP_P=float(top_p), A_MIN_P=float(min_p), A_SEED_LOW=7)
    features = layout.F_RANDOM | layout.F_FILTER
    state.params[:, layout.A_FEATURES] = features
    tokens, flags = _sample(logits.repeat(rows, 1), state, torch.arange(rows, dtype=torch.int32), features)
    assert not flags.any()
    expected = _expected(logits, top_k, top_p, min_p)
    assert set(tokens.tolist()) <= set(expected)
    chi = sum((int((tokens == i).sum()) - rows * p) ** 2 / (rows * p) for i, p in expected.items())
    assert chi < 35


def test_greedy_takes_the_first_of_equal_ones_and_never_draws() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0], [3.0, 1.0, 3.0]])
    tokens, flags = _sample(logits, _state(2, A_TEMPERATURE=0.0), torch.ones(2, dtype=torch.int32), layout.F_RANDOM)
    assert tokens.tolist() == [1, 0]
    assert not flags.any()


@pytest.mark.parametrize("features", [0, layout.F_RANDOM, layout.F_RANDOM | layout.F_FILTER])
def test_rows_that_are_not_finite_are_marked_and_disturb_no_other(features) -> None:
    inf = float("inf")
    logits = torch.tensor([[0.0, 1.0], [float("nan"), 0.0], [inf, 0.0], [-inf, -inf], [-inf, 0.0]])
    tokens, flags = _sample(logits, _state(5), torch.ones(5, dtype=torch.int32), features)
    assert flags.tolist() == [False, True, True, True, False]
    assert tokens[4] == 1
    assert bool(((tokens >= 0) & (tokens < 2)).all())


def test_penalties_follow_their_definition() -> None:
    state = _state(2, A_REPETITION=1.5, A_PRESENCE=0.25, A_FREQUENCY=0.5, A_PROMPT_LEN=3)
    state.params[0, layout.A_FEATURES] = layout.F_PENALTIES
    known = [4, 1, 4, 2, 2, 5, 3]
    state.tokens[:2, : len(known)] = torch.tensor(known, dtype=torch.int32)
    logits = torch.tensor([[1.0, -2.0, 3.0, -4.0, 5.0, 6.0, 7.0, 0.0]]).repeat(2, 1)
    before = logits.clone()
    lengths = torch.tensor([6, 6], dtype=torch.int32)
    sampling.logit_adjust(logits, state, torch.tensor([0, 1]), lengths, layout.F_PENALTIES)
    expected = before[0].tolist()
    for token in {4, 1, 2, 5}:
        expected[token] = expected[token] / 1.5 if expected[token] > 0 else expected[token] * 1.5
    for token, times in {2: 2, 5: 1}.items():
        expected[token] -= 0.5 * times + 0.25
    torch.testing.assert_close(logits[0], torch.tensor(expected))
    assert torch.equal(logits[1], before[1])


def test_bias_stop_tokens_and_bad_words_touch_only_their_tokens() -> None:
    state = _state(1, A_NUM_BIAS=1, A_NUM_STOP=1, A_MIN_LEN=4, A_NUM_BAD=8, A_PROMPT_LEN=2)
    features = layout.F_BIAS | layout.F_MIN_LEN | layout.F_BAD_WORDS
    state.params[0, layout.A_FEATURES] = features
    state.tokens[0, :3] = torch.tensor([7, 8, 9])
    state.bias_ids[0, 0], state.bias_values[0, 0], state.stop_ids[0, 0] = 2, 1.5, 3
    state.bad_words[0, :8] = torch.tensor([1, 4, 2, 9, 5, 2, 8, 6])
    logits = torch.zeros(1, 10)
    sampling.logit_adjust(logits, state, torch.tensor([0]), torch.tensor([3], dtype=torch.int32), features)
    never = float("-inf")
    assert logits[0].tolist() == [0, 0, 1.5, never, never, never, 0, 0, 0, 0]
    later = torch.zeros(1, 10)
    sampling.logit_adjust(later, state, torch.tensor([0]), torch.tensor([4], dtype=torch.int32), layout.F_MIN_LEN)
    assert torch.equal(later, torch.zeros(1, 10))


def test_grammar_mask_reads_bit_31() -> None:
    logits = torch.zeros(2, 40)
    mask = torch.tensor([[-(2**31), 1]], dtype=torch.int32)
    sampling.grammar_mask(logits, mask, torch.tensor([1]))
    assert logits[1].isfinite().nonzero().flatten().tolist() == [31, 32]
    assert bool(logits[0].isfinite().all())


def test_log_probabilities_rank_ties_as_equal() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0]])
    got = sampling.log_probabilities(logits, torch.tensor([2]), 2)
    torch.testing.assert_close(got.chosen, logits.log_softmax(1)[:, 2])
    assert got.rank.tolist() == [1]
    assert sorted(got.top_ids[0].tolist()) == [1, 2]
    assert sampling.log_probabilities(logits, torch.tensor([3]), 0).rank.tolist() == [3]
