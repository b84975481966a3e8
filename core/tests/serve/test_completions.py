"""/v1/completions: forms of a prompt, sampling values, choices, streams."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from vllm_core.sampling_params import SamplingParams

pytestmark = pytest.mark.anyio

PATH = "/v1/completions"


async def test_answer_has_text_usage_and_reasons(client: Any) -> None:
    answer = (await client.post(PATH, {"model": "fake", "prompt": "abc"})).json()
    assert answer.pop("id").startswith("cmpl-")
    assert answer.pop("created") > 0
    assert answer == {
        "object": "text_completion",
        "model": "fake",
        "choices": [{"index": 0, "text": "Hello wörld", "logprobs": None, "finish_reason": "stop", "stop_reason": None}],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 3,
            "total_tokens": 6,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("abc", ["abc"]),
        (["a", "bc"], ["a", "bc"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
async def test_four_forms_of_a_prompt(client: Any, engine: Any, prompt: Any, expected: list[Any]) -> None:
    answer = (await client.post(PATH, {"prompt": prompt})).json()
    assert [call[0] for call in engine.calls] == expected
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(expected)))
    assert all(call[5] for call in engine.calls), "special tokens are added"
    assert answer["usage"]["completion_tokens"] == 3 * len(expected)


async def test_each_prompt_has_its_own_engine_id(client: Any, engine: Any) -> None:
    answer = (await client.post(PATH, {"prompt": ["a", "b"]})).json()
    assert [call[2] for call in engine.calls] == [f"{answer['id']}-0", f"{answer['id']}-1"]


async def test_choices_of_n_follow_their_prompt(client: Any) -> None:
    answer = (await client.post(PATH, {"prompt": ["a", "bc"], "n": 3})).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3, 4, 5]
    assert answer["usage"]["prompt_tokens"] == 3, "a prompt counts once, whatever n"
    assert answer["usage"]["completion_tokens"] == 18


async def test_without_a_model_the_first_name_answers(client: Any) -> None:
    assert (await client.post(PATH, {"prompt": "a"})).json()["model"] == "fake"
    assert (await client.post(PATH, {"prompt": "a", "model": "alias"})).json()["model"] == "alias"


async def test_every_sampling_value_reaches_the_engine(client: Any, engine: Any) -> None:
    sent = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.5,
        "seed": 7,
        "stop": ["x"],
        "stop_token_ids": [4],
        "bad_words": ["no"],
        "ignore_eos": True,
        "max_tokens": 9,
        "min_tokens": 2,
        "logprobs": 2,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
    }
    answer = await client.post(PATH, {"prompt": "a", **sent, "logit_bias": {"5": -3}})
    assert answer.status_code == 200
    assert engine.calls[0][1] == SamplingParams(**sent, logit_bias={5: -3})


async def test_defaults_are_those_of_vllm(client: Any, engine: Any) -> None:
    await client.post(PATH, {"prompt": "a"})
    assert engine.calls[0][1] == SamplingParams()
    assert engine.calls[0][1].max_tokens == 16


async def test_null_is_as_if_not_sent(client: Any, engine: Any) -> None:
    await client.post(PATH, {"prompt": "a", "temperature": None, "stop": None, "suffix": None, "stream_options": None})
    assert engine.calls[0][1] == SamplingParams()


async def test_the_models_own_defaults_hold_unless_sent(client: Any, engine: Any) -> None:
    engine.generation_config = {"temperature": 0.6, "top_k": 20}
    await client.post(PATH, {"prompt": "a", "top_k": 3})
    assert (engine.calls[0][1].temperature, engine.calls[0][1].top_k) == (0.6, 3)


async def test_priority_and_salt_reach_the_engine(client: Any, engine: Any) -> None:
    engine.scheduling_policy = "priority"
    await client.post(PATH, {"prompt": "a", "priority": -2, "cache_salt": "tenant"})
    assert engine.calls[0][3:5] == (-2, "tenant")


async def test_priority_without_the_policy_is_refused(client: Any) -> None:
    answer = await client.post(PATH, {"prompt": "a", "priority": 1})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "priority"


async def test_echo_puts_the_prompt_before_each_choice(client: Any) -> None:
    answer = (await client.post(PATH, {"prompt": ["ab", "c"], "echo": True, "n": 2})).json()
    assert [c["text"] for c in answer["choices"]] == ["abHello wörld"] * 2 + ["cHello wörld"] * 2


async def test_echo_of_token_ids_decodes_them(client: Any, engine: Any) -> None:
    assert (await client.post(PATH, {"prompt": [1, 2], "echo": True})).json()["choices"][0]["text"] == "abHello wörld"
    engine.tokenizer = None
    answer = await client.post(PATH, {"prompt": [1, 2], "echo": True})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "echo")


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_and_no_token_rate_the_prompt_alone(client: Any, engine: Any, parse_events: Any, stream: bool) -> None:
    engine.pieces = ["Hel"]
    body = {"prompt": "ab", "echo": True, "max_tokens": 0, "logprobs": 1, "return_token_ids": True, "stream": stream}
    answer = await client.post(PATH, body)
    (choice,) = (parse_events(answer.text)[0] if stream else answer.json())["choices"]
    assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == ("ab", [], "length")
    if not stream:
        assert answer.json()["usage"]["completion_tokens"] == 0, "it is not counted either"
    assert choice["logprobs"]["tokens"] == []
    assert engine.calls[0][1].max_tokens == 1, "the engine makes one, which is not shown"
    assert engine.calls[0][1].prompt_logprobs == 1


async def test_no_token_without_echo_is_refused(client: Any) -> None:
    assert (await client.post(PATH, {"prompt": "ab", "max_tokens": 0})).json()["error"]["param"] == "max_tokens"


async def test_logprobs_are_parallel_lists(client: Any) -> None:
    answer = (await client.post(PATH, {"prompt": "a", "logprobs": 2})).json()
    assert answer["choices"][0]["logprobs"] == {
        "text_offset": [0, 3, 4],
        "token_logprobs": [0.0, -0.5, -1.0],
        "tokens": ["Hel", "\ufffd", "lo wörld"],
        "top_logprobs": [
            {"Hel": 0.0, "a": -0.25, "b": -9999.0},
            {"\ufffd": -0.5, "a": -0.25, "b": -9999.0},
            {"lo wörld": -1.0, "a": -0.25, "b": -9999.0},
        ],
    }


async def test_logprobs_zero_gives_the_chosen_token_alone(client: Any) -> None:
    logprobs = (await client.post(PATH, {"prompt": "a", "logprobs": 0})).json()["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] is None
    assert logprobs["token_logprobs"] == [0.0, -0.5, -1.0]


async def test_token_ids_on_request(client: Any) -> None:
    assert (await client.post(PATH, {"prompt": "a", "return_token_ids": True})).json()["choices"][0]["token_ids"] == [
        10,
        11,
        12,
    ]


async def test_stop_reason_is_told(client: Any) -> None:
    assert (await client.post(PATH, {"prompt": "a", "stop": "x"})).json()["choices"][0]["stop_reason"] == "x"


async def test_stream_is_sse_byte_for_byte(client: Any) -> None:
    answer = await client.post(PATH, {"prompt": "a", "stream": True})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    first = json.loads(answer.text.split("\n\n")[0].removeprefix("data: "))
    head = f'{{"id":"{first["id"]}","object":"text_completion","created":{first["created"]},"model":"fake","choices":['
    assert answer.content.decode() == (
        f'data: {head}{{"index":0,"text":"Hel","logprobs":null,"finish_reason":null,"stop_reason":null}}]}}\n\n'
        f'data: {head}{{"index":0,"text":"lo wörld","logprobs":null,"finish_reason":"stop","stop_reason":null}}]}}\n\n'
        "data: [DONE]\n\n"
    )


async def test_usage_comes_with_every_chunk_where_that_is_asked_for(client: Any, parse_events: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer = await client.post(PATH, {"prompt": "ab", "stream": True, "stream_options": options})
    *chunks, last = parse_events(answer.text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"] == 3
    assert all(chunk["usage"]["prompt_tokens"] == 2 for chunk in chunks)
    alone = {"prompt": "ab", "stream": True, "stream_options": {"continuous_usage_stats": True}}
    assert "usage" not in (await client.post(PATH, alone)).text, "it says how usage is included, not that it is"


async def test_usage_comes_in_a_last_chunk_without_choices(client: Any, parse_events: Any) -> None:
    body = {"prompt": ["ab", "c"], "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = parse_events((await client.post(PATH, body)).text)
    assert chunks
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 6,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


async def test_a_stream_without_the_option_has_no_usage_field(client: Any, parse_events: Any) -> None:
    assert all("usage" not in chunk for chunk in parse_events((await client.post(PATH, {"prompt": "a", "stream": True})).text))


async def test_streamed_choices_join_to_the_whole_answer(client: Any, parse_events: Any) -> None:
    body = {"prompt": ["ab", "c"], "n": 2, "echo": True, "stream": True}
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    for chunk in parse_events((await client.post(PATH, body)).text):
        (choice,) = chunk["choices"]
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        if choice["finish_reason"]:
            assert choice["index"] not in reasons, "one end each"
            reasons[choice["index"]] = choice["finish_reason"]
    assert texts == {0: "abHello wörld", 1: "abHello wörld", 2: "cHello wörld", 3: "cHello wörld"}
    assert reasons == dict.fromkeys(range(4), "stop")


async def test_streamed_logprobs_are_those_of_the_whole_answer(client: Any, parse_events: Any) -> None:
    body = {"prompt": "a", "logprobs": 2}
    whole = (await client.post(PATH, body)).json()["choices"][0]["logprobs"]
    parts = [c["choices"][0]["logprobs"] for c in parse_events((await client.post(PATH, {**body, "stream": True})).text)]
    assert {name: [value for part in parts for value in part[name]] for name in whole} == whole


async def test_a_refused_prompt_is_a_status_also_for_a_stream(client: Any, engine: Any) -> None:
    from vllm_core.errors import RequestError

    engine.errors["a"] = RequestError("Prompt is empty", on="prompt", found="no tokens", expected="one", fix="send one")
    answer = await client.post(PATH, {"prompt": "a", "stream": True})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_an_error_of_one_prompt_ends_the_others(client: Any, engine: Any) -> None:
    from vllm_core.errors import RequestError

    engine.errors["b"] = RequestError("Prompt is empty", on="prompt", found="no tokens", expected="one", fix="send one")
    answer = await client.post(PATH, {"prompt": ["a", "b", "c"]})
    assert answer.status_code == 400
    assert sorted(engine.closed) == sorted(call[2] for call in engine.calls if call[0] != "b")


async def test_an_error_in_a_stream_is_an_event(client: Any, engine: Any, parse_events: Any, engine_dead: Any) -> None:
    engine.error_after[1] = engine_dead
    answer = await client.post(PATH, {"prompt": "a", "stream": True})
    assert answer.status_code == 200
    chunk, error = parse_events(answer.text)
    assert chunk["choices"][0]["text"] == "Hel"
    assert error["error"]["type"] == "service_unavailable"
    assert "exit status -9" in error["error"]["message"]


async def test_an_unexpected_error_in_a_stream_shows_no_internals(client: Any, engine: Any, parse_events: Any) -> None:
    engine.error_after[1] = ZeroDivisionError("secret")
    answer = await client.post(PATH, {"prompt": "a", "stream": True})
    assert parse_events(answer.text)[-1]["error"]["type"] == "server_error"
    assert "secret" not in answer.text


async def test_a_request_that_the_engine_gave_up_is_a_500(client: Any, engine: Any) -> None:
    engine.failure = "op 'linear' failed"
    answer = await client.post(PATH, {"prompt": "a"})
    assert answer.status_code == 500
    assert "op 'linear' failed" in answer.json()["error"]["message"]


async def test_more_sequences_than_allowed_are_refused(client: Any, engine: Any) -> None:
    answer = await client.post(PATH, {"prompt": ["a"] * 1024, "n": 3})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")
    assert engine.calls == []


async def test_no_answer_has_a_number_that_json_lacks(client: Any) -> None:
    text = (await client.post(PATH, {"prompt": "a", "logprobs": 2})).text
    assert json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert not any(math.isinf(v) for v in json.loads(text)["choices"][0]["logprobs"]["token_logprobs"])
