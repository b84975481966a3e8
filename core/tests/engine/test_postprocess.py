"""Updates become text: stop strings, held-back tails, n sequences as one request, log-probabilities, embeddings."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_core.engine.messages import EngineRequest, RequestUpdate, TokenLogprobs
from vllm_core.engine.postprocess import Postprocessor, shorten
from vllm_core.engine.preprocess import Prepared, child_id
from vllm_core.sampling_params import PoolingParams, SamplingParams


class CharStream:
    def push(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))

    def flush(self) -> str:
        return ""


class CharTokenizer:
    """Token id = code point."""

    def stream(self, skip_special_tokens: bool = True) -> CharStream:
        return CharStream()

    def token_text(self, token: int) -> str:
        return chr(token)


def prepared(params: SamplingParams | PoolingParams, n: int = 1, request_id: str = "r") -> Prepared:
    children = [EngineRequest(request_id=child_id(request_id, i), prompt_token_ids=[1], arrival_time=0.0) for i in range(n)]
    return Prepared(request_id, "p", [1], params, children)


def update(text: str, index: int = 0, **fields: Any) -> RequestUpdate:
    return RequestUpdate(request_id=child_id("r", index), token_ids=[ord(c) for c in text], **fields)


def started(params: SamplingParams | PoolingParams, n: int = 1, *, partial: bool = True) -> Postprocessor:
    post = Postprocessor(CharTokenizer())
    post.add(prepared(params, n), partial=partial)
    return post


def test_text_and_tokens_accumulate() -> None:
    post = started(SamplingParams())
    post.process([update("ab")])
    (output,) = post.process([update("c", finish_reason="length")]).outputs
    assert output.outputs[0].text == "abc"
    assert output.outputs[0].token_ids == [97, 98, 99]
    assert output.finished
    assert len(post) == 0


def test_a_stop_string_ends_the_sequence_and_asks_for_an_abort() -> None:
    post = started(SamplingParams(stop=["END"]))
    assert post.process([update("helloE")]).abort == []
    processed = post.process([update("NDmore")])
    assert processed.abort == ["r#0"]
    out = processed.outputs[0].outputs[0]
    assert (out.text, out.finish_reason, out.stop_reason) == ("hello", "stop", "END")


def test_text_that_may_become_a_stop_string_is_held_back() -> None:
    post = started(SamplingParams(stop=["END"]))
    (output,) = post.process([update("helloEN")]).outputs
    assert output.outputs[0].text == "hello"
    (output,) = post.process([update("x", finish_reason="length")]).outputs
    assert output.outputs[0].text == "helloENx"


def test_the_earliest_of_several_stop_strings_wins() -> None:
    post = started(SamplingParams(stop=["zz", "b"]))
    out = post.process([update("abzz")]).outputs[0].outputs[0]
    assert (out.text, out.stop_reason) == ("a", "b")


def test_the_stop_string_stays_when_asked_for() -> None:
    post = started(SamplingParams(stop="b", include_stop_str_in_output=True))
    assert post.process([update("abc")]).outputs[0].outputs[0].text == "ab"


def test_a_stop_token_is_in_the_ids_and_not_in_the_text() -> None:
    post = started(SamplingParams(stop_token_ids=[98]))
    out = post.process([update("ab", finish_reason="stop", stop_reason=98)]).outputs[0].outputs[0]
    assert (out.text, out.token_ids, out.stop_reason) == ("a", [97, 98], 98)


def test_the_models_own_end_is_no_stop_reason() -> None:
    """As in vLLM: a reason is the string or token that the user named."""
    post = started(SamplingParams(stop_token_ids=[97]))
    out = post.process([update("ab", finish_reason="stop", stop_reason=98)]).outputs[0].outputs[0]
    assert (out.text, out.token_ids, out.finish_reason, out.stop_reason) == ("a", [97, 98], "stop", None)


def test_a_stop_string_in_the_last_update_needs_no_abort() -> None:
    post = started(SamplingParams(stop="b"))
    processed = post.process([update("ab", finish_reason="length")])
    assert processed.abort == []
    assert processed.outputs[0].outputs[0].finish_reason == "stop"


def test_sequences_of_one_request_finish_together() -> None:
    post = started(SamplingParams(n=2), n=2)
    (output,) = post.process([update("a", 0, finish_reason="length")]).outputs
    assert not output.finished
    (output,) = post.process([update("b", 1, finish_reason="length")]).outputs
    assert output.finished
    assert [o.text for o in output.outputs] == ["a", "b"]


def test_updates_after_the_end_are_dropped() -> None:
    post = started(SamplingParams(stop="b"))
    post.process([update("b")])
    assert post.process([update("c")]).outputs == []


def test_dropping_a_request_names_the_sequences_that_still_run() -> None:
    post = started(SamplingParams(n=3), n=3)
    post.process([update("x", 1, finish_reason="length")])
    assert post.drop("r") == ["r#0", "r#2"]
    assert post.drop("r") == []


def test_logprobs_hold_the_chosen_token_and_the_best() -> None:
    post = started(SamplingParams(logprobs=2))
    entry = TokenLogprobs(99, -3.0, 7, [97, 98], [-0.5, -1.0])
    out = post.process([update("c", logprobs=[entry], finish_reason="length")]).outputs[0].outputs[0]
    assert out.cumulative_logprob == -3.0
    (row,) = out.logprobs
    assert list(row) == [99, 97, 98]
    assert (row[99].rank, row[97].rank, row[97].decoded_token) == (7, 1, "a")


def test_logprobs_come_without_text_too() -> None:
    post = started(SamplingParams(logprobs=0, detokenize=False))
    entry = TokenLogprobs(99, -3.0, 7, [], [])
    out = post.process([update("c", logprobs=[entry], finish_reason="length")]).outputs[0].outputs[0]
    assert out.text == ""
    assert len(out.logprobs) == 1


def test_an_error_reaches_the_output() -> None:
    post = started(SamplingParams())
    (output,) = post.process([update("", finish_reason="error", error="logits were not finite")]).outputs
    assert output.error == "logits were not finite"
    assert output.finished


def test_an_embedding_is_cut_and_normalised_again() -> None:
    post = started(PoolingParams(dimensions=2))
    (output,) = post.process([update("", pooled=[3.0, 4.0, 12.0], finish_reason="stop")]).outputs
    assert output.outputs.embedding == pytest.approx([0.6, 0.8])


def test_an_embedding_that_failed_says_so() -> None:
    post = started(PoolingParams())
    (output,) = post.process([update("", finish_reason="error", error="boom")]).outputs
    assert output.error == "boom"


def test_a_zero_vector_stays_zero() -> None:
    assert shorten([0.0, 0.0], 1) == [0.0]


@given(text=st.text(alphabet="abEND", max_size=40), cuts=st.lists(st.integers(1, 6), min_size=40, max_size=40))
def test_how_tokens_are_grouped_changes_nothing(text: str, cuts: list[int]) -> None:
    def run(sizes: list[int]) -> tuple[str, str | None]:
        post = started(SamplingParams(stop=["END", "bb"]))
        at, sizes = 0, list(sizes)
        shown = ""
        while True:
            step = text[at : at + sizes.pop(0)]
            at += len(step)
            done = at >= len(text)
            out = post.process([update(step, finish_reason="length" if done else None)]).outputs[0].outputs[0]
            assert out.text.startswith(shown), "text that was shown was taken back"
            shown = out.text
            if out.finished:
                return out.text, out.finish_reason

    assert run(cuts) == run([1] * 41)
    expected = min((text.find(s) for s in ("END", "bb") if s in text), default=None)
    assert run(cuts)[0] == (text if expected is None else text[:expected])


def test_where_nobody_looks_text_comes_with_the_end() -> None:
    post = started(SamplingParams(), partial=False)
    (output,) = post.process([update("ab")]).outputs
    (output,) = post.process([update("c")]).outputs
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("", [97, 98, 99])
    (output,) = post.process([update("d", finish_reason="length")]).outputs
    assert output.outputs[0].text == "abcd"
    assert output.finished


def test_where_nobody_looks_a_stop_string_still_ends_the_sequence() -> None:
    post = started(SamplingParams(stop=["END"]), partial=False)
    post.process([update("aEN")])
    processed = post.process([update("Db")])
    assert processed.abort == [child_id("r", 0)]
    assert processed.outputs[0].outputs[0].text == "a"


@pytest.mark.parametrize("include", [False, True])
def test_where_nobody_looks_a_stop_token_is_shown_only_if_asked_for(include: bool) -> None:
    post = started(SamplingParams(include_stop_str_in_output=include), partial=False)
    post.process([update("ab")])
    (output,) = post.process([update("$", finish_reason="stop", stop_reason=ord("$"))]).outputs
    assert output.outputs[0].text == ("ab$" if include else "ab")
    assert output.outputs[0].token_ids == [97, 98, ord("$")]


def test_where_nobody_looks_an_aborted_sequence_has_the_text_so_far() -> None:
    post = started(SamplingParams(), partial=False)
    post.process([update("ab")])
    (output,) = post.process([update("", finish_reason="abort")]).outputs
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("ab", "abort")


@given(
    pieces=st.lists(st.text(alphabet="abEND", min_size=1, max_size=3), min_size=1, max_size=12),
    stop=st.sampled_from([None, ["END"], ["a", "bb"]]),
    logprobs=st.sampled_from([None, 0]),
    reason=st.sampled_from(["length", "stop", "abort", "error"]),
)
def test_what_is_left_in_the_end_does_not_depend_on_who_looks(
    pieces: list[str], stop: list[str] | None, logprobs: int | None, reason: str
) -> None:
    def run(partial: bool) -> Any:
        post = started(SamplingParams(stop=stop, logprobs=logprobs), n=2, partial=partial)
        output, aborted = None, []
        for number, piece in enumerate(pieces):
            ending = {"finish_reason": reason, "queue_s": 1.0} if number == len(pieces) - 1 else {}
            if number == 0:
                ending["num_cached_tokens"] = 3
            entries = [TokenLogprobs(ord(c), -1.0, 1, [], []) for c in piece] if logprobs is not None else None
            for index in range(2):
                processed = post.process([update(piece, index, logprobs=entries, **ending)])
                aborted += processed.abort
                output = processed.outputs[0] if processed.outputs else output
        output.metrics.pop("time_to_first_token_s")
        return output, aborted, len(post)

    assert run(True) == run(False)
