"""/v1/chat/completions: messages, template, limits, streams."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vllm_core.errors import ConfigError
from vllm_core.serve.features import make_features

pytestmark = pytest.mark.anyio

PATH = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]


async def test_answer_is_a_message_with_usage(client: Any, engine: Any) -> None:
    answer = (await client.post(PATH, {"model": "fake", "messages": HI})).json()
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert answer["choices"] == [
        {
            "index": 0,
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
            "message": {"role": "assistant", "content": "Hello wörld"},
        }
    ]
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + 3
    prompt, *_, special = engine.calls[0]
    assert prompt == "<user>Hi"
    assert not special, "the template has the special tokens"


async def test_the_answer_may_take_what_the_context_has_left(client: Any, engine: Any) -> None:
    await client.post(PATH, {"messages": HI})
    assert engine.calls[0][1].max_tokens is None


async def test_the_models_own_limit_holds_unless_sent(client: Any, engine: Any) -> None:
    engine.generation_config = {"max_new_tokens": 33}
    await client.post(PATH, {"messages": HI})
    await client.post(PATH, {"messages": HI, "max_tokens": 50})
    assert [call[1].max_tokens for call in engine.calls] == [33, 50]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_both_names_of_the_limit_work(client: Any, engine: Any, name: str) -> None:
    await client.post(PATH, {"messages": HI, name: 5})
    assert engine.calls[0][1].max_tokens == 5


async def test_two_different_limits_are_refused(client: Any) -> None:
    answer = await client.post(PATH, {"messages": HI, "max_tokens": 5, "max_completion_tokens": 6})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens")


async def test_text_parts_are_joined_by_line_breaks(client: Any, engine: Any) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    await client.post(PATH, {"messages": [{"role": "user", "content": parts}]})
    assert engine.calls[0][0] == "<user>one\ntwo"


async def test_roles_and_names_reach_the_template(client: Any, engine: Any) -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Hi", "name": "Ada"},
        {"role": "assistant", "content": "Hello", "refusal": None, "tool_calls": []},
    ]
    assert (await client.post(PATH, {"messages": messages})).status_code == 200
    assert engine.tokenizer.seen[0] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi", "name": "Ada"},
        {"role": "assistant", "content": "Hello"},
    ]


async def test_template_options_reach_the_template(client: Any, engine: Any) -> None:
    body = {"messages": HI, "chat_template_kwargs": {"enable_thinking": False}, "continue_final_message": True}
    assert (await client.post(PATH, body)).status_code == 200
    seen = engine.tokenizer.seen[1]
    assert seen == {
        "enable_thinking": False,
        "continue_final_message": True,
        "add_generation_prompt": False,
        "chat_template": None,
    }


async def test_template_values_of_the_operator_hold_where_a_request_sends_none(engine: Any, make_client: Any) -> None:
    client = make_client(engine, features=make_features(default_chat_template_kwargs={"enable_thinking": False, "style": 1}))
    await client.post(PATH, {"messages": HI})
    assert engine.tokenizer.seen[1].items() >= {"enable_thinking": False, "style": 1}.items()
    await client.post(PATH, {"messages": HI, "chat_template_kwargs": {"enable_thinking": True}})
    assert engine.tokenizer.seen[1].items() >= {"enable_thinking": True, "style": 1}.items()
    with pytest.raises(ConfigError, match="messages"):
        make_features(default_chat_template_kwargs={"messages": []})


@pytest.mark.parametrize("name", ["chat_template", "messages", "tools", "self", "tokenizer"])
async def test_template_options_cannot_replace_the_servers(client: Any, name: str) -> None:
    answer = await client.post(PATH, {"messages": HI, "chat_template_kwargs": {name: "x"}})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, f"chat_template_kwargs.{name}")


async def test_continuing_and_opening_a_message_exclude_each_other(client: Any) -> None:
    body = {"messages": HI, "continue_final_message": True, "add_generation_prompt": True}
    assert (await client.post(PATH, body)).status_code == 400


async def test_a_model_without_a_template_says_so(client: Any, engine: Any) -> None:
    engine.tokenizer.chat_template = None
    answer = await client.post(PATH, {"messages": HI})
    assert answer.status_code == 400
    assert "chat template" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ("Hi", "messages"),
        ([], "messages"),
        (["Hi"], "messages[0]"),
        ([{"role": "wizard", "content": "Hi"}], "messages[0].role"),
        ([{"role": "tool", "content": "Hi", "tool_call_id": 1}], "messages[0].tool_call_id"),
        ([{"role": ["user"], "content": "Hi"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "messages[0].content[0]"),
        ([*HI, {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}], "messages[1].tool_calls[0]"),
        ([{"role": "user", "content": "Hi", "mood": "good"}], "messages[0].mood"),
        ([{"role": "user", "content": "Hi", "name": 3}], "messages[0].name"),
        (HI * 10_001, "messages"),
    ],
)
async def test_wrong_messages_are_named(client: Any, engine: Any, messages: Any, param: str) -> None:
    answer = await client.post(PATH, {"messages": messages})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert engine.calls == []


async def test_logprobs_have_the_likeliest_tokens(client: Any) -> None:
    answer = (await client.post(PATH, {"messages": HI, "logprobs": True, "top_logprobs": 2})).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["Hel", "\ufffd", "lo wörld"]
    assert content[0] == {
        "token": "Hel",
        "logprob": 0.0,
        "bytes": [72, 101, 108],
        "top_logprobs": [
            {"token": "a", "logprob": -0.25, "bytes": [97]},
            {"token": "Hel", "logprob": 0.0, "bytes": [72, 101, 108]},
        ],
    }
    assert content[1]["bytes"] is None, "a part of a character has no text of its own"


async def test_logprobs_alone_list_no_other_tokens(client: Any) -> None:
    answer = (await client.post(PATH, {"messages": HI, "logprobs": True})).json()
    assert [entry["top_logprobs"] for entry in answer["choices"][0]["logprobs"]["content"]] == [[], [], []]


async def test_top_logprobs_need_logprobs(client: Any) -> None:
    answer = await client.post(PATH, {"messages": HI, "top_logprobs": 2})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "top_logprobs")


async def test_stream_is_sse_byte_for_byte(client: Any) -> None:
    answer = await client.post(PATH, {"messages": HI, "stream": True})
    first = json.loads(answer.text.split("\n\n")[0].removeprefix("data: "))
    head = f'{{"id":"{first["id"]}","object":"chat.completion.chunk","created":{first["created"]},"model":"fake","choices":['
    running = '{"index":0,"logprobs":null,"finish_reason":null,"stop_reason":null,"delta":'
    ended = '{"index":0,"logprobs":null,"finish_reason":"stop","stop_reason":null,"delta":'
    assert answer.content.decode() == (
        f'data: {head}{running}{{"role":"assistant","content":""}}}}]}}\n\n'
        f'data: {head}{running}{{"content":"Hel"}}}}]}}\n\n'
        f'data: {head}{ended}{{"content":"lo wörld"}}}}]}}\n\n'
        "data: [DONE]\n\n"
    )


async def test_stream_of_n_opens_each_choice_once(client: Any, parse_events: Any) -> None:
    body = {"messages": HI, "stream": True, "n": 2, "stream_options": {"include_usage": True}}
    *chunks, last = parse_events((await client.post(PATH, body)).text)
    opened = [c["choices"][0]["index"] for c in chunks if "role" in c["choices"][0]["delta"]]
    assert opened == [0, 1]
    texts = ["", ""]
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["delta"].get("content", "")
    assert texts == ["Hello wörld"] * 2
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 6)
    assert all(chunk["usage"] is None for chunk in chunks)


async def test_streamed_logprobs_are_those_of_the_whole_answer(client: Any, parse_events: Any) -> None:
    body = {"messages": HI, "logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    whole = (await client.post(PATH, body)).json()["choices"][0]
    choices = [c["choices"][0] for c in parse_events((await client.post(PATH, {**body, "stream": True})).text)]
    assert [entry for c in choices if c["logprobs"] for entry in c["logprobs"]["content"]] == whole["logprobs"]["content"]
    assert [i for c in choices for i in c.get("token_ids", [])] == whole["token_ids"] == [10, 11, 12]


async def test_usage_comes_with_every_chunk_of_a_chat_too(client: Any, parse_events: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = parse_events((await client.post(PATH, {"messages": HI, "stream": True, "stream_options": options})).text)
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"] == 3


async def test_stream_options_need_a_stream(client: Any) -> None:
    answer = await client.post(PATH, {"messages": HI, "stream_options": {"include_usage": True}})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream_options")


async def test_hints_to_a_hosted_service_ask_nothing(client: Any) -> None:
    """Agents send them with every request; /v1/responses took them before."""
    hints = {
        "prompt_cache_key": "thread-1",
        "prompt_cache_retention": "in_memory",
        "safety_identifier": "user-1",
        "verbosity": "medium",
        "stream": True,
        "stream_options": {"include_usage": True, "include_obfuscation": False},
    }
    assert (await client.post("/v1/chat/completions", {"messages": HI, **hints})).status_code == 200
    for name, value in (("verbosity", "low"), ("stream_options", {"include_obfuscation": True})):
        answer = await client.post("/v1/chat/completions", {"messages": HI, **hints, name: value})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
