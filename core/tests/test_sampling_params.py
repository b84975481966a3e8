"""Sampling values: names and defaults that users know, wrong ones refused with the value and the range."""

import math

import msgspec
import pytest

from vllm_core.api import batch
from vllm_core.errors import RequestError
from vllm_core.sampling_params import MAX_SHOWN, PoolingParams, SamplingParams, StructuredOutputsParams

WRONG = [
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", "hot"),
    ("temperature", True),
    ("temperature", 10**400),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("top_p", math.nan),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("n", 0),
    ("n", 1000),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", -1.0),
    ("repetition_penalty", 5e-324),
    ("max_tokens", 0),
    ("min_tokens", -1),
    ("logprobs", -1),
    ("logprobs", 21),
    ("prompt_logprobs", 21),
    ("seed", 2**64),
    ("stop", [""]),
    ("stop", ["x"] * 65),
    ("bad_words", [""]),
    ("logit_bias", {1: 101.0}),
    ("logit_bias", {1: math.nan}),
    ("logit_bias", {1: -(10**400)}),
    ("logit_bias", dict.fromkeys(range(batch.MAX_BIAS + 1), 0.0)),
    ("stop_token_ids", list(range(batch.MAX_STOP))),
]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=lambda v: repr(v)[:20])
def test_a_wrong_value_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.on.startswith(name)
    assert caught.value.found
    assert caught.value.expected
    assert name in caught.value.fix


@pytest.mark.parametrize("name", ["stop_token_ids", "bad_words", "bad_words_token_ids", "stop", "logit_bias"])
@pytest.mark.parametrize("value", [5, {"a"}, b"text"])
def test_what_is_no_list_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.on == name


def test_an_error_repeats_little_of_a_long_value() -> None:
    """A server would send megabytes back."""
    with pytest.raises(RequestError) as caught:
        SamplingParams(stop=["x" * 100_000, ""])
    assert len(caught.value.found) == MAX_SHOWN


@pytest.mark.parametrize("number", [2**64, -(2**63) - 1, 10**30])
def test_a_grammar_with_integers_that_do_not_travel_is_refused(number: int) -> None:
    """Sent to the engine's process they would fail there as a fault of the server."""
    for wanted in ({"json": {"type": "integer", "maximum": number}}, {"structural_tag": {"a": [number]}}):
        with pytest.raises(RequestError, match="ints"):
            StructuredOutputsParams(**wanted)
    assert StructuredOutputsParams(json={"enum": [2**64 - 1, -(2**63)]})


def test_a_text_is_not_taken_for_a_list_of_its_characters() -> None:
    with pytest.raises(RequestError, match="bad_words"):
        SamplingParams(bad_words="ugly")
    with pytest.raises(RequestError, match="bad_words_token_ids"):
        SamplingParams(bad_words_token_ids=[5])


def test_min_tokens_above_max_tokens_is_refused() -> None:
    with pytest.raises(RequestError, match="min_tokens"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_defaults_are_those_that_users_of_vllm_know() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.seed, params.stop) == (16, 0, None, None)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)


@pytest.mark.parametrize(
    ("fields", "bits"),
    [
        ({"temperature": 0.0}, 0),
        ({}, batch.F_RANDOM),
        ({"top_k": 5}, batch.F_RANDOM | batch.F_FILTER),
        ({"top_k": -1}, batch.F_RANDOM),
        ({"temperature": 0.0, "top_k": 5}, 0),
        ({"temperature": 0.0, "repetition_penalty": 1.1}, batch.F_PENALTIES),
        ({"temperature": 0.0, "logit_bias": {1: 1.0}}, batch.F_BIAS),
        ({"temperature": 0.0, "min_tokens": 2}, batch.F_MIN_LEN),
        ({"temperature": 0.0, "bad_words": ["x"]}, batch.F_BAD_WORDS),
        ({"temperature": 0.0, "logprobs": 0}, batch.F_LOGPROBS),
        ({"temperature": 0.0, "prompt_logprobs": 1}, batch.F_PROMPT_LOGPROBS),
    ],
)
def test_features_name_what_the_tail_must_do(fields: dict[str, object], bits: int) -> None:
    assert SamplingParams(**fields).features() == bits


def test_a_changed_copy_is_checked_too() -> None:
    with pytest.raises(RequestError):
        SamplingParams().replace(temperature=-1.0)


def test_params_travel_as_msgpack() -> None:
    params = SamplingParams(temperature=0.5, stop=["a"], logit_bias={3: -1.0}, seed=2**63)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


def test_an_unknown_field_is_no_silent_default() -> None:
    with pytest.raises(TypeError):
        SamplingParams(temprature=0.5)


def test_dimensions_must_be_positive() -> None:
    with pytest.raises(RequestError, match="dimensions"):
        PoolingParams(dimensions=0)
