"""Tools, reasoning and structure in chats, responses and messages, on an engine that says what it is told to."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vllm_core.serve.features import make_features

pytestmark = pytest.mark.anyio

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
HI = [{"role": "user", "content": "Hi"}]
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
CALL = ["<tool_", 'call>\n{"name": "f", "argu', 'ments": {"a": 1}}\n</tool_call>']
NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.fixture
def say(engine: Any, make_client: Any) -> Any:
    """A client of an engine whose answer is these pieces."""

    def make(*pieces: str, **features: Any) -> Any:
        engine.pieces = pieces
        return make_client(engine, features=make_features(**features))

    return make


HERMES = {"tool_call_parser": "hermes", "enable_auto_tool_choice": True}


async def test_calls_that_the_model_decided_on(say: Any, engine: Any) -> None:
    client = say("Well.", *CALL, **HERMES)
    choice = (await client.post(CHAT, {"messages": HI, "tools": [TOOL]})).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Well."
    (call,) = choice["message"]["tool_calls"]
    assert (call["type"], call["function"]) == ("function", {"name": "f", "arguments": '{"a": 1}'})
    assert engine.tokenizer.seen[1]["tools"][0]["function"]["name"] == "f"


async def test_streamed_calls_have_name_and_id_once(say: Any, parse_events: Any) -> None:
    client = say(*CALL, **HERMES)
    answer = await client.post(CHAT, {"messages": HI, "tools": [TOOL], "stream": True})
    choices = [event["choices"][0] for event in parse_events(answer.text)]
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
    assert [call.get("id") is not None for call in calls] == [True] + [False] * (len(calls) - 1)
    assert calls[0]["function"]["name"] == "f"
    assert "".join(call["function"]["arguments"] for call in calls) == '{"a": 1}'
    assert choices[-1]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(("choice", "text"), [("required", '[{"name": "f", "parameters": {"a": 2}}]'), (NAMED, '{"a": 2}')])
async def test_calls_that_must_come_are_enforced(say: Any, engine: Any, choice: Any, text: str) -> None:
    client = say(text)
    message = (await client.post(CHAT, {"messages": HI, "tools": [TOOL], "tool_choice": choice})).json()["choices"][0]
    assert message["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 2}'}
    assert message["finish_reason"] == ("tool_calls" if choice == "required" else "stop")
    assert engine.calls[0][1].structured_outputs.json is not None


async def test_no_call_is_looked_for_where_none_may_be_made(say: Any, engine: Any) -> None:
    client = say(*CALL, **HERMES)
    choice = (await client.post(CHAT, {"messages": HI, "tools": [TOOL], "tool_choice": "none"})).json()["choices"][0]
    assert choice["message"]["content"] == "".join(CALL)
    assert "tools" not in engine.tokenizer.seen[1]


async def test_auto_needs_a_parser(say: Any) -> None:
    answer = await say("x").post(CHAT, {"messages": HI, "tools": [TOOL]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tool_choice")
    assert "--tool-call-parser" in answer.json()["error"]["message"]


async def test_a_parser_of_special_tokens_sees_them(say: Any, engine: Any) -> None:
    client = say("x", tool_call_parser="mistral", enable_auto_tool_choice=True)
    await client.post(CHAT, {"messages": HI, "tools": [TOOL]})
    assert engine.calls[0][1].skip_special_tokens is False


async def test_reasoning_has_its_own_field(say: Any, parse_events: Any) -> None:
    pieces = ("<think>\nHm", "m.\n</thi", "nk>\n\nYes.")
    client = say(*pieces, reasoning_parser_name="qwen3")
    message = (await client.post(CHAT, {"messages": HI})).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hmm."}
    hidden = (await client.post(CHAT, {"messages": HI, "include_reasoning": False})).json()["choices"][0]["message"]
    assert hidden == {"role": "assistant", "content": "Yes."}
    body = {"messages": HI, "stream": True, "stream_options": {"include_usage": True}}
    events = parse_events((await client.post(CHAT, body)).text)
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hmm."
    assert "".join(delta.get("content") or "" for delta in deltas) == "Yes."
    assert events[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2


async def test_structure_begins_after_the_reasoning(say: Any, engine: Any) -> None:
    client = say("x", reasoning_parser_name="qwen3")
    await client.post(CHAT, {"messages": HI, "response_format": {"type": "json_object"}})
    assert engine.calls[0][1].structured_outputs.after == "</think>"


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ({"type": "json_object"}, {"json_object": True}),
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}, {"json": {"type": "integer"}}),
    ],
)
async def test_formats_become_structure(say: Any, engine: Any, form: Any, expected: dict[str, Any]) -> None:
    await say("1", structured_outputs_config={"disable_any_whitespace": True}).post(
        CHAT, {"messages": HI, "response_format": form}
    )
    structure = engine.calls[0][1].structured_outputs
    assert {name: getattr(structure, name) for name in expected} == expected
    assert structure.disable_any_whitespace


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, "response_format.json_schema.schema"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": 1}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "min_tokens": 2}, "min_tokens"),
        ({"structured_outputs": {"regex": "a"}, "tools": [TOOL], "tool_choice": NAMED}, "response_format"),
        ({"chat_template": "{{ x }}"}, "chat_template"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"tools": "x"}, "tools"),
    ],
)
async def test_what_cannot_be_asked_is_named(say: Any, engine: Any, fields: dict[str, Any], param: str) -> None:
    answer = await say("x").post(CHAT, {"messages": HI, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert engine.calls == []


async def test_a_template_of_the_request_is_used_where_it_is_trusted(say: Any, engine: Any) -> None:
    client = say("x", trust_request_chat_template=True)
    assert (await client.post(CHAT, {"messages": HI, "chat_template": "{{ x }}"})).status_code == 200
    assert engine.tokenizer.seen[1]["chat_template"] == "{{ x }}"


async def test_calls_go_to_templates_as_objects(say: Any, engine: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    talk = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    await say("x").post(CHAT, {"messages": talk})
    seen = engine.tokenizer.seen[0]
    assert seen[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert seen[2] == {"role": "tool", "tool_call_id": "1", "content": "2"}


async def test_a_response_has_reasoning_text_and_calls_as_items(say: Any) -> None:
    client = say("<think>Hm.</think>", "Yes. ", *CALL, reasoning_parser_name="qwen3", **HERMES)
    tool = {"type": "function", "name": "f", "parameters": TOOL["function"]["parameters"]}
    body = {"input": "Hi", "tools": [tool], "metadata": {"a": "b"}}
    answer = (await client.post(RESPONSES, body)).json()
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message", "function_call"]
    assert answer["output"][0]["content"][0]["text"] == "Hm."
    assert answer["output"][1]["content"][0]["text"] == "Yes."
    assert (answer["output"][2]["name"], answer["output"][2]["arguments"]) == ("f", '{"a": 1}')
    assert (answer["status"], answer["metadata"], answer["store"]) == ("completed", {"a": "b"}, False)


async def test_events_of_a_response_are_numbered_and_complete(say: Any) -> None:
    client = say("Yes.", " Well.")
    text = (await client.post(RESPONSES, {"input": "Hi", "stream": True})).text
    events = [json.loads(part.partition("data: ")[2]) for part in text.split("\n\n") if part]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"].removeprefix("response.") for event in events] == [
        *("created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "Yes. Well."


async def test_items_of_a_response_go_back_as_they_came(say: Any, engine: Any) -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {
            "type": "message",
            "id": "m",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Yes."}],
        },
        {"type": "function_call", "id": "fc", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "2"},
    ]
    assert (await say("x").post(RESPONSES, {"input": items, "instructions": "Be brief."})).status_code == 200
    seen = engine.tokenizer.seen[0]
    assert [message["role"] for message in seen] == ["system", "user", "assistant", "tool"]
    assert seen[2]["reasoning_content"] == "Hm."
    assert seen[2]["tool_calls"][0]["id"] == "1"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "x"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"input": 1}, "input"),
        ({"input": [1]}, "input[0]"),
        ({"input": [{"type": "image_generation_call"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call", "call_id": "1"}]}, "messages[0].tool_calls[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"text": {"verbosity": "high"}}, "text"),
        ({"text": {"format": {"type": "json_schema"}}}, "response_format.json_schema.schema"),
        ({"reasoning": {"depth": 1}}, "reasoning.depth"),
        ({"max_output_tokens": 0}, "max_tokens"),
        ({"temperature": 3000}, "temperature"),
    ],
)
async def test_responses_name_what_is_wrong(say: Any, fields: dict[str, Any], param: str) -> None:
    answer = await say("x").post(RESPONSES, {"input": "Hi", **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


async def test_a_message_has_thinking_text_and_tool_use_as_blocks(say: Any) -> None:
    client = say("<think>Hm.</think>", "Yes. ", *CALL, reasoning_parser_name="qwen3", **HERMES)
    tool = {"name": "f", "input_schema": TOOL["function"]["parameters"], "cache_control": {"type": "ephemeral"}}
    answer = (await client.post(MESSAGES, {"messages": HI, "max_tokens": 9, "tools": [tool]})).json()
    assert [block["type"] for block in answer["content"]] == ["thinking", "text", "tool_use"]
    assert answer["content"][2]["input"] == {"a": 1}
    assert answer["stop_reason"] == "tool_use"


async def test_a_message_may_say_who_asks(say: Any) -> None:
    """Agents that speak Anthropic's API send it with every request."""
    body = {"messages": HI, "max_tokens": 9, "metadata": {"user_id": "u-1"}, "cache_control": {"type": "ephemeral"}}
    assert (await say("Yes.").post(MESSAGES, body)).status_code == 200
    answer = await say("Yes.").post(MESSAGES, {**body, "metadata": {"team": "x"}})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "metadata")


async def test_events_of_a_message_are_in_order(say: Any) -> None:
    text = (await say("Yes.", " Well.").post(MESSAGES, {"messages": HI, "max_tokens": 9, "stream": True})).text
    events = [part.partition("\n")[0].removeprefix("event: ") for part in text.split("\n\n") if part]
    assert events == [
        *("message_start", "content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]


async def test_blocks_of_a_conversation_become_messages(say: Any, engine: Any) -> None:
    talk = [
        {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "text", "text": "Yes."},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "2"}]},
    ]
    body = {"messages": talk, "max_tokens": 9, "system": [{"type": "text", "text": "Be brief."}]}
    assert (await say("x").post(MESSAGES, body)).status_code == 200
    seen = engine.tokenizer.seen[0]
    assert [message["role"] for message in seen] == ["system", "user", "assistant", "tool"]
    assert seen[2]["tool_calls"][0]["function"]["arguments"] == {"a": 1}


@pytest.mark.parametrize(
    ("fields", "status", "kind"),
    [
        ({"messages": 1}, 400, "invalid_request_error"),
        ({"max_tokens": 0}, 400, "invalid_request_error"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "invalid_request_error"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "invalid_request_error"),
        ({"tool_choice": {"type": "some"}}, 400, "invalid_request_error"),
        ({"thinking": {"type": "deep"}}, 400, "invalid_request_error"),
        ({"container": "x"}, 400, "invalid_request_error"),
        ({"model": "other"}, 404, "not_found_error"),
    ],
)
async def test_errors_of_messages_have_their_own_form(say: Any, fields: dict[str, Any], status: int, kind: str) -> None:
    answer = await say("x").post(MESSAGES, {"messages": HI, "max_tokens": 9, **fields})
    assert answer.status_code == status
    assert (answer.json()["type"], answer.json()["error"]["type"]) == ("error", kind)
    assert answer.json()["error"]["message"]


async def test_a_grammar_that_leads_nowhere_is_the_requests_fault(say: Any, engine: Any) -> None:
    from vllm_core.engine.structured.constraint import DEAD_END

    engine.failure = DEAD_END
    answer = await say("x").post(CHAT, {"messages": HI, "structured_outputs": {"regex": "a"}})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "structured_outputs")


async def test_an_error_in_the_events_of_a_response_has_the_next_number(say: Any, engine: Any, engine_dead: Any) -> None:
    engine.error_after[1] = engine_dead
    text = (await say("a", "b").post(RESPONSES, {"input": "Hi", "stream": True})).text
    events = [json.loads(part.partition("data: ")[2]) for part in text.split("\n\n") if part]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert (events[-1]["type"], events[-1]["code"]) == ("error", "service_unavailable")


async def test_messages_say_when_to_come_back_while_the_engine_starts_again(say: Any, engine: Any, engine_dead: Any) -> None:
    client = say("a", "b")
    engine.error_after[0] = engine_dead
    answer = await client.post(MESSAGES, {"messages": HI, "max_tokens": 9})
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "overloaded_error")
    assert answer.headers["retry-after"]
    engine.error_after = {1: engine_dead}
    text = (await client.post(MESSAGES, {"messages": HI, "max_tokens": 9, "stream": True})).text
    assert json.loads(text.rstrip().rpartition("data: ")[2])["error"]["type"] == "overloaded_error"
