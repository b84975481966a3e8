"""Prompts become requests; whatever is wrong is refused before the engine sees it."""

from collections.abc import Sequence

import pytest

from vllm_core.api import batch
from vllm_core.engine.preprocess import Limits, Prepared, Preprocessor
from vllm_core.errors import ContextLengthError, RequestError
from vllm_core.sampling_params import PoolingParams, SamplingParams

LIMITS = Limits(max_model_len=32, vocab_size=1000, hidden_size=16, stop_token_ids=(7, 8))


class ByteTokenizer:
    def encode(self, text: str, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        return ([1] if add_special_tokens else []) + list(text.encode())


def generate(prompt: object, params: SamplingParams | None = None, tokenizer: object = ByteTokenizer()) -> Prepared:
    return Preprocessor(LIMITS, tokenizer).generate("r", prompt, params or SamplingParams(), arrival_time=1.0)


def refused(prompt: object, params: SamplingParams | None = None, tokenizer: object = ByteTokenizer()) -> RequestError:
    with pytest.raises(RequestError) as caught:
        generate(prompt, params, tokenizer)
    assert caught.value.found
    assert caught.value.expected
    assert caught.value.fix
    return caught.value


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("ab", [1, 97, 98]),
        ([5, 6], [5, 6]),
        ({"prompt": "a"}, [1, 97]),
        ({"prompt_token_ids": [3]}, [3]),
    ],
)
def test_each_form_of_a_prompt_is_read(prompt: object, ids: list[int]) -> None:
    assert generate(prompt).prompt_token_ids == ids


def test_a_misspelt_key_of_a_prompt_names_the_nearest() -> None:
    assert "'prompt'" in refused({"promt": "x"}).fix


def test_a_request_with_n_is_split_with_a_seed_each() -> None:
    prepared = generate([5], SamplingParams(n=3, seed=10))
    assert [c.request_id for c in prepared.children] == ["r#0", "r#1", "r#2"]
    assert [c.seed for c in prepared.children] == [10, 11, 12]
    assert all(c.params.n == 1 for c in prepared.children)


def test_without_a_seed_two_requests_differ() -> None:
    seeds: set[int] = {generate([5]).children[0].seed for _ in range(8)}
    assert len(seeds) > 1


def test_max_tokens_is_what_the_context_leaves() -> None:
    assert generate([5] * 30, SamplingParams(max_tokens=100)).children[0].max_tokens == 2
    assert generate([5] * 30, SamplingParams(max_tokens=None)).children[0].max_tokens == 2
    assert generate([5] * 10, SamplingParams(max_tokens=4)).children[0].max_tokens == 4


def test_min_tokens_that_the_context_has_no_room_for_are_refused() -> None:
    assert generate([5] * 30, SamplingParams(max_tokens=100, min_tokens=2)).children[0].max_tokens == 2
    error = refused([5] * 30, SamplingParams(max_tokens=100, min_tokens=3))
    assert (error.on, error.found) == ("min_tokens", "3")
    assert "at most 2" in error.expected


def test_the_models_stop_tokens_join_the_users_unless_ignored() -> None:
    assert generate([5], SamplingParams(stop_token_ids=[9])).children[0].stop_token_ids == [9, 7, 8]
    assert generate([5], SamplingParams(stop_token_ids=[9], ignore_eos=True)).children[0].stop_token_ids == [9]


def test_an_empty_prompt_is_refused() -> None:
    assert "empty" in refused([]).what
    assert "empty" in refused("", tokenizer=_NoSpecial()).what


class _NoSpecial(ByteTokenizer):
    def encode(self, text: str, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        return list(text.encode())


@pytest.mark.parametrize("ids", [[1000], [-1], [3, 2**40], ["a"], [True], [1.0]])
def test_tokens_outside_the_vocabulary_are_refused(ids: Sequence[object]) -> None:
    assert refused(ids).on == "prompt"


def test_a_long_text_in_place_of_a_token_is_not_repeated() -> None:
    assert len(refused(["x" * 100_000]).found) <= 80


def test_a_prompt_that_fills_the_context_is_refused_with_both_lengths() -> None:
    error = refused([5] * 32)
    assert isinstance(error, ContextLengthError)
    assert "32 tokens" in error.found
    assert "fewer than 32" in error.expected


def test_text_without_a_tokenizer_is_refused() -> None:
    assert "no tokenizer" in refused("text", tokenizer=None).what.lower()


def test_bad_words_are_tokenized_with_and_without_a_space() -> None:
    words = generate([5], SamplingParams(bad_words=["x"])).children[0].bad_words
    assert words == [[ord("x")], [ord(" "), ord("x")]]


@pytest.mark.parametrize(
    "fields",
    [
        {"bad_words_token_ids": [[]]},
        {"bad_words_token_ids": [[1] * 200, [2] * 200]},
        {"bad_words_token_ids": [[5000]]},
        {"logit_bias": {5000: 1.0}},
        {"stop_token_ids": [5000]},
    ],
)
def test_tokens_in_parameters_are_checked_too(fields: dict[str, object]) -> None:
    refused([5], SamplingParams(**fields))


def test_the_capacity_of_bad_words_is_that_of_the_device_record() -> None:
    fits = [[1]] * (batch.MAX_BAD_WORDS // 2)
    assert len(generate([5], SamplingParams(bad_words_token_ids=fits)).children[0].bad_words) == len(fits)


def test_an_embedding_longer_than_the_hidden_size_is_refused() -> None:
    with pytest.raises(RequestError, match="at most 16"):
        Preprocessor(LIMITS, None).pool("r", [5], PoolingParams(dimensions=17), arrival_time=0.0)


def test_an_embedding_prompt_may_fill_the_context_but_not_more() -> None:
    pre = Preprocessor(LIMITS, None)
    assert len(pre.pool("r", [5] * 32, PoolingParams(), arrival_time=0.0).children) == 1
    with pytest.raises(RequestError, match="at most 32 tokens"):
        pre.pool("r", [5] * 33, PoolingParams(), arrival_time=0.0)
