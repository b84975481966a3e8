"""Each sampling parameter against a computation of its own on transformers' logits."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest
import torch

from vllm_core import SamplingParams

PROMPT = [5, 9, 200, 31, 9, 77, 5, 120, 64, 9, 18, 3]
COUNT = 16


def penalised(repetition=1.0, presence=0.0, frequency=0.0):
    """Penalties by the book: repetition over all tokens, the others over the output."""

    def adjust(logits, tokens):
        for token in set(tokens):
            logits[token] = logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
        for token, times in Counter(tokens[len(PROMPT) :]).items():
            logits[token] -= presence + frequency * times
        return logits

    return adjust


@pytest.mark.parametrize(
    "penalties",
    [
        {"repetition": 1.7},
        {"repetition": 0.8},
        {"presence": 1.5},
        {"presence": -1.5},
        {"frequency": 1.2},
        {"frequency": -0.7},
        {"repetition": 1.3, "presence": 0.6, "frequency": 0.4},
    ],
    ids=str,
)
def test_penalties(llama, shared, one, penalties):
    out = one(
        shared, PROMPT, temperature=0.0, max_tokens=COUNT, ignore_eos=True, **{f"{k}_penalty": v for k, v in penalties.items()}
    )
    assert out.token_ids == llama.greedy(PROMPT, COUNT, penalised(**penalties))


def test_the_penalties_above_change_the_tokens(llama):
    """Otherwise the test above would compare greedy with greedy."""
    plain = llama.greedy(PROMPT, COUNT)
    for penalties in ({"repetition": 1.7}, {"presence": 1.5}, {"frequency": 1.2}):
        assert llama.greedy(PROMPT, COUNT, penalised(**penalties)) != plain


def test_logit_bias(llama, shared, one):
    bias = {4: 3.0, 77: -5.0, 250: 2.5, 0: 1.0}

    def adjust(logits, tokens):
        for token, value in bias.items():
            logits[token] += value
        return logits

    out = one(shared, PROMPT, temperature=0.0, max_tokens=COUNT, ignore_eos=True, logit_bias=bias)
    assert out.token_ids == llama.greedy(PROMPT, COUNT, adjust)
    assert one(shared, PROMPT, temperature=0.0, max_tokens=3, logit_bias={42: 100.0}).token_ids == [42, 42, 42]


def test_bad_words_of_several_tokens(llama, shared, one):
    """The last token of a word is forbidden after the others, and only there."""
    plain = llama.greedy(PROMPT, COUNT)
    words = [plain[2:4], [plain[6]], [1, 2, 3]]

    def adjust(logits, tokens):
        for *before, last in words:
            if tokens[len(tokens) - len(before) :] == before:
                logits[last] = float("-inf")
        return logits

    out = one(shared, PROMPT, temperature=0.0, max_tokens=COUNT, ignore_eos=True, bad_words_token_ids=words)
    expected = llama.greedy(PROMPT, COUNT, adjust)
    assert out.token_ids == expected
    assert plain[6] not in expected
    assert expected != plain


def test_bad_words_as_text(llama, shared, one):
    """A byte tokenizer: the word is banned at its last byte, alone and after a space."""
    out = one(shared, "abc", temperature=0.0, max_tokens=COUNT, ignore_eos=True)
    tokenizer = shared.get_tokenizer()
    word = next(t for t in map(tokenizer.token_text, out.token_ids) if t.isascii() and t.isprintable() and t != " ")
    again = one(shared, "abc", temperature=0.0, max_tokens=COUNT, ignore_eos=True, bad_words=[word])
    assert word in out.text
    assert word not in again.text


def test_stop_token_ids_end_the_sequence_and_stay_out_of_the_text(llama, shared, one):
    plain = llama.greedy(PROMPT, COUNT)
    stop = plain[5]
    end = plain.index(stop) + 1
    out = one(shared, PROMPT, temperature=0.0, max_tokens=COUNT, ignore_eos=True, stop_token_ids=[stop, 1])
    assert (out.token_ids, out.finish_reason, out.stop_reason) == (plain[:end], "stop", stop)
    assert out.text == shared.get_tokenizer().decode(plain[: end - 1])
    shown = one(
        shared,
        PROMPT,
        temperature=0.0,
        max_tokens=COUNT,
        ignore_eos=True,
        stop_token_ids=[stop],
        include_stop_str_in_output=True,
    )
    assert shown.text == shared.get_tokenizer().decode(plain[:end])


def test_min_tokens_puts_stop_tokens_off(llama, shared, one):
    plain = llama.greedy(PROMPT, COUNT)
    stop, minimum = plain[1], 6

    def adjust(logits, tokens):
        if len(tokens) - len(PROMPT) < minimum:
            logits[stop] = float("-inf")
        return logits

    expected = llama.greedy(PROMPT, COUNT, adjust)
    expected = expected[: expected.index(stop) + 1] if stop in expected else expected
    values = {"temperature": 0.0, "max_tokens": COUNT, "ignore_eos": True, "stop_token_ids": [stop]}
    assert len(one(shared, PROMPT, **values).token_ids) <= 2
    out = one(shared, PROMPT, min_tokens=minimum, **values)
    assert out.token_ids == expected
    assert len(out.token_ids) >= minimum


def test_min_tokens_puts_stop_strings_off(shared, one):
    values = {"temperature": 0.0, "max_tokens": COUNT, "ignore_eos": True}
    whole = one(shared, "abc", **values)
    pieces = [shared.get_tokenizer().token_text(token) for token in whole.token_ids]
    stop = next(piece for piece in pieces if piece != "�")
    first = pieces.index(stop)
    assert len(one(shared, "abc", stop=stop, **values).token_ids) == first + 1
    assert len(one(shared, "abc", stop=stop, min_tokens=first + 3, **values).token_ids) >= first + 3


def test_the_end_token_stops_unless_ignored(shared, one):
    """A bias makes it the most likely token."""
    values = {"temperature": 0.0, "max_tokens": 4, "logit_bias": {256: 100.0}}
    out = one(shared, PROMPT, **values)
    assert (out.token_ids, out.finish_reason, out.stop_reason, out.text) == ([256], "stop", None, "")
    ignored = one(shared, PROMPT, ignore_eos=True, **values)
    assert (ignored.token_ids, ignored.finish_reason) == ([256] * 4, "length")
    assert one(shared, PROMPT, min_tokens=3, **values).token_ids[:3].count(256) == 0


def test_a_stop_string_is_found_over_the_border_of_tokens(shared, one):
    """Bytes are tokens, so every longer string spans several."""
    values = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True, "seed": 1}
    text = one(shared, "hello", **values).text
    at = next(i for i in range(4, len(text) - 3) if "�" not in text[i : i + 3])
    stop = text[at : at + 3]
    at = text.index(stop)
    out = one(shared, "hello", stop=["nowhere", stop], **values)
    assert (out.text, out.finish_reason, out.stop_reason) == (text[:at], "stop", stop)
    assert one(shared, "hello", stop=stop, include_stop_str_in_output=True, **values).text == text[: at + 3]
    assert shared.get_metrics().running == 0, "the engine was told that the string ended the sequence"


def test_text_that_may_become_a_stop_string_is_held_back(shared):
    """What was shown is never taken back."""
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    text = shared.generate(["hello"], params, use_tqdm=False)[0].outputs[0].text
    stop = text[10:14]
    seen = [o.outputs[0].text for o in shared.stream("hello", params.replace(stop=stop))]
    assert all(later.startswith(earlier) for earlier, later in pairwise(seen))
    assert seen[-1] == text[: text.index(stop)]


def test_max_tokens_none_goes_to_the_end_of_the_context(shared, one):
    out = one(shared, PROMPT, temperature=0.0, max_tokens=None, ignore_eos=True)
    assert len(out.token_ids) == shared.max_model_len - len(PROMPT)
    assert out.finish_reason == "length"
    assert len(one(shared, PROMPT, temperature=0.0, max_tokens=10_000, ignore_eos=True).token_ids) == len(out.token_ids)


def test_a_prompt_that_leaves_room_for_one_token(llama, shared, one):
    prompt = [i % 250 for i in range(shared.max_model_len - 1)]
    out = one(shared, prompt, temperature=0.0, max_tokens=None, ignore_eos=True)
    assert out.token_ids == llama.greedy(prompt, 1)


def test_top_k_of_one_is_greedy(llama, shared, one):
    for temperature in (0.5, 3.0):
        out = one(shared, PROMPT, temperature=temperature, top_k=1, max_tokens=COUNT, seed=3, ignore_eos=True)
        assert out.token_ids == llama.greedy(PROMPT, COUNT)


def drawn(llm, count=512, **params):
    """First tokens for many seeds."""
    params = [SamplingParams(max_tokens=1, n=128, seed=1000 * i, **params) for i in range(count // 128)]
    outputs = llm.generate([PROMPT] * len(params), params, use_tqdm=False)
    return Counter(o.token_ids[0] for output in outputs for o in output.outputs)


@pytest.mark.parametrize("filters", [{"top_k": 4}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 6, "top_p": 0.7}], ids=str)
def test_filters_leave_the_right_tokens(llama, shared, filters):
    """All that remain are drawn, and none that do not."""
    temperature = 0.7
    logits = llama.logits(PROMPT)[-1] / temperature
    order = logits.argsort(descending=True)[: filters.get("top_k", len(logits))]
    probabilities = logits[order].softmax(0)
    before = probabilities.cumsum(0) - probabilities
    kept = (before < filters.get("top_p", 2.0)) & (probabilities >= filters.get("min_p", 0.0) * probabilities[0])
    expected = dict(zip(order[kept].tolist(), (probabilities[kept] / probabilities[kept].sum()).tolist(), strict=True))
    found = drawn(shared, temperature=temperature, **filters)
    assert set(found) <= set(expected)
    assert {token for token, p in expected.items() if p > 0.02} <= set(found)
    assert len(expected) < 40, "a filter that keeps nearly all would test nothing"
    for token, p in expected.items():
        assert found[token] / 512 == pytest.approx(p, abs=0.09)


def test_temperature_draws_from_the_softmax(llama, shared):
    """Frequencies over fixed seeds; half a percent of chance for a right sampler to miss by this much."""
    expected = (llama.logits(PROMPT)[-1] / 1.3).softmax(0)
    found = drawn(shared, temperature=1.3)
    top = expected.topk(8)
    for p, token in zip(top.values.tolist(), top.indices.tolist(), strict=True):
        assert found[token] / 512 == pytest.approx(p, abs=0.08)


def test_n_sequences_have_seeds_of_their_own(shared, one):
    """Sequence i of seed s is the only sequence of seed s + i."""
    params = SamplingParams(n=4, seed=11, temperature=1.0, max_tokens=8, ignore_eos=True)
    (several,) = shared.generate([PROMPT], params, use_tqdm=False)
    assert [o.index for o in several.outputs] == [0, 1, 2, 3]
    assert len({tuple(o.token_ids) for o in several.outputs}) == 4
    for index, output in enumerate(several.outputs):
        single = one(shared, PROMPT, seed=11 + index, temperature=1.0, max_tokens=8, ignore_eos=True)
        assert single.token_ids == output.token_ids


def test_without_a_seed_two_runs_differ(shared, one):
    first, second = (one(shared, PROMPT, temperature=1.5, max_tokens=24, ignore_eos=True).token_ids for _ in range(2))
    assert first != second


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64 - 1])
def test_every_seed_can_be_used(shared, one, seed):
    first, second = (one(shared, PROMPT, temperature=1.0, max_tokens=6, seed=seed).token_ids for _ in range(2))
    assert first == second


def test_all_parameters_at_once_disturb_no_neighbour(llama, shared):
    """A greedy request beside others of every kind."""
    rng = random.Random(1)
    others = [
        SamplingParams(
            temperature=rng.choice([0.0, 0.9]),
            top_k=rng.choice([0, 5]),
            top_p=rng.choice([1.0, 0.5]),
            repetition_penalty=rng.choice([1.0, 1.4]),
            logit_bias=rng.choice([None, {3: 5.0}]),
            bad_words_token_ids=rng.choice([None, [[7], [3, 4]]]),
            min_tokens=rng.choice([0, 3]),
            logprobs=rng.choice([None, 3]),
            prompt_logprobs=rng.choice([None, 2]),
            max_tokens=rng.randint(3, 20),
        )
        for _ in range(20)
    ]
    prompts = [[rng.randrange(256) for _ in range(rng.randint(1, 30))] for _ in others]
    mine = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
    outputs = shared.generate([*prompts, PROMPT], [*others, mine], use_tqdm=False)
    assert outputs[-1].outputs[0].token_ids == llama.greedy(PROMPT, COUNT)
    assert torch.isfinite(torch.tensor([o.outputs[0].cumulative_logprob or 0.0 for o in outputs])).all()
