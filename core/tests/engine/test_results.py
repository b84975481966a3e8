"""Reading a step's arrays: each row its own entries, as many as it asked for."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_core.api import HostLogprobs, StepKey, StepResult
from vllm_core.engine.request import Request
from vllm_core.engine.results import Reader, num_logprobs


@pytest.fixture
def entry(fake):
    def make(prompt=5, **options):
        return Request(fake.request("a", prompt, **options), (0, 1), 1, 64, 0.0)

    return make


def host(rows, k=3, offset=0.0):
    return HostLogprobs(
        chosen=np.arange(rows, dtype=np.float32) + np.float32(offset),
        rank=np.arange(rows, dtype=np.int32) + 1,
        top_ids=np.arange(rows * k, dtype=np.int32).reshape(rows, k),
        top=-np.arange(rows * k, dtype=np.float32).reshape(rows, k),
    )


def reader(tokens, features=0, **arrays):
    count = len(tokens)
    result = StepResult(
        tokens=np.array(tokens, dtype=np.int32).reshape(-1, 1),
        counts=np.ones(count, dtype=np.int32),
        nonfinite=arrays.pop("nonfinite", np.zeros(count, dtype=bool)),
        **arrays,
    )
    return Reader(result, StepKey(count, count, 1, "sample", features))


def test_tokens_and_flags_are_plain_values():
    one = reader([4, 5], nonfinite=np.array([False, True]))
    assert one.tokens == [4, 5]
    assert all(type(token) is int for token in one.tokens)
    assert one.any_nonfinite
    assert one.nonfinite == [False, True]
    assert not reader([1]).any_nonfinite


@pytest.mark.parametrize(("k", "wanted"), [(0, []), (1, [3]), (3, [3, 4, 5])])
def test_a_row_gets_as_many_entries_as_it_asked_for(entry, k, wanted):
    (found,) = reader([6, 4], logprobs=host(2)).logprobs(entry(logprobs=k), 1)
    assert (found.token, found.logprob, found.rank) == (4, 1.0, 2)
    assert found.top_ids == wanted
    assert found.top == [-float(value) for value in wanted]


def test_a_row_that_did_not_ask_gets_none(entry):
    assert reader([6], logprobs=host(1)).logprobs(entry(), 0) is None
    assert reader([6], logprobs=host(1)).logprobs(entry(prompt_logprobs=2), 0) is None


def test_the_step_brings_the_most_that_a_row_asks_for(entry):
    assert num_logprobs(entry(logprobs=2, prompt_logprobs=5)) == 5
    assert num_logprobs(entry(logprobs=0)) == 0
    assert num_logprobs(entry()) == 0


def prompt_logprobs(fake, prompt):
    return [None] + [fake.logprob(prompt[:at], prompt[at]) for at in range(1, len(prompt))]


def values(update):
    return [None if one is None else one.logprob for one in update.prompt_logprobs]


def test_prompt_entries_go_to_their_rows_and_are_about_the_token_that_follows(fake):
    engine = fake.engine([fake.group()])
    prompts = {"a": [3, 1, 4, 1], "b": [2, 6]}
    engine.add(fake.request("a", prompts["a"], prompt_logprobs=2), fake.request("plain", 5))
    engine.add(fake.request("b", prompts["b"], prompt_logprobs=0))
    engine.step()
    for name, k in (("a", 2), ("b", 0)):
        (update,) = engine.updates[name]
        assert values(update) == prompt_logprobs(fake, prompts[name])
        assert [one.token for one in update.prompt_logprobs[1:]] == prompts[name][1:]
        assert all(one.top_ids == list(range(k)) for one in update.prompt_logprobs[1:])
    assert engine.updates["plain"][0].prompt_logprobs is None


def test_the_entries_of_a_request_that_ended_in_flight_are_passed_over(fake):
    engine = fake.engine([fake.group()], depth=2)
    engine.add(fake.request("gone", [3, 1, 4], prompt_logprobs=0), fake.request("here", [2, 6, 5], prompt_logprobs=0))
    engine.launch()
    engine.abort("gone")
    engine.read()
    assert engine.ends["gone"].prompt_logprobs is None
    assert values(engine.updates["here"][0]) == prompt_logprobs(fake, [2, 6, 5])
