"""What is wrong with a request is a 400 (or its own status) in OpenAI's error form; the engine never sees it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vllm_core.errors import ContextLengthError, TokenizerError

pytestmark = pytest.mark.anyio

COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
HI = [{"role": "user", "content": "Hi"}]


def check(answer: Any, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert list(answer.json()) == ["error"]
    error = answer.json()["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert error["type"] == "invalid_request_error"
    return error


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"prompt": "a"} x',
        b"{'prompt': 'a'}",
        b"[1, 2]",
        b'"prompt"',
        b"null",
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\\udc00\\ud800"}',
        b'{"\\ud800": 1, "prompt": "a"}',
        b'{"prompt": ' + b"[" * 5000,
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": "a\x00\x01"}',
    ],
)
async def test_what_is_not_a_json_object_is_refused(client: Any, engine: Any, body: bytes) -> None:
    assert check(await client.post(COMPLETIONS, body))["param"] == "body"
    assert engine.calls == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "1"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_p", float("nan")),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", -1),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0),
        ("n", 0),
        ("n", 129),
        ("n", "2"),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("min_tokens", 17),
        ("logprobs", 21),
        ("logprobs", -1),
        ("logprobs", True),
        ("seed", 2**64),
        ("seed", 1.5),
        ("stop", ""),
        ("stop", [""]),
        ("stop", [1]),
        ("stop", ["x"] * 65),
        ("stop", {"a": 1}),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", [1] * 10_000),
        ("bad_words", [1]),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"\u0661": 1}),
        ("logit_bias", [1]),
        ("logit_bias", {str(token): 1 for token in range(513)}),
        ("stream", "yes"),
        ("stream_options", {"include_usage": 1}),
        ("stream_options", {"exclude_usage": True}),
        ("cache_salt", "x" * 257),
        ("priority", 2**40),
        ("model", 1),
        ("echo", "true"),
    ],
)
async def test_wrong_values_are_named(client: Any, engine: Any, name: str, value: Any) -> None:
    error = check(await client.post(COMPLETIONS, {"prompt": "a", name: value}))
    assert error["param"] == name
    assert all(f"{part}:" in error["message"] for part in ("found", "expected", "fix")), "all four parts"
    assert engine.calls == []


async def test_a_bias_out_of_range_names_the_token(client: Any) -> None:
    assert check(await client.post(COMPLETIONS, {"prompt": "a", "logit_bias": {"7": 101}}))["param"] == "logit_bias[7]"
    assert check(await client.post(COMPLETIONS, {"prompt": "a", "logit_bias": {"7": "x"}}))["param"] == "logit_bias[7]"


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ('"logit_bias": {"7": 1%s}', "logit_bias[7]"),
        ('"structured_outputs": {"json": {"type": "integer", "maximum": 1%s}}', "structured_outputs.json"),
        ('"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": 1%s}}}', "structured_outputs.json"),
    ],
)
async def test_integers_beyond_all_bounds_are_named(client: Any, engine: Any, field: str, param: str) -> None:
    """They were answered 500: too large for a float, or for the way to the engine."""
    body = f'{{"prompt": "a", {field % ("0" * 400)}}}'.encode()
    assert check(await client.post(COMPLETIONS, body))["param"] == param
    assert engine.calls == []


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (None, "prompt"),
        (1, "prompt"),
        ([], "prompt"),
        ({}, "prompt"),
        ([None], "prompt[0]"),
        ([1.5], "prompt[0]"),
        ([True], "prompt[0]"),
        (["a", 1], "prompt[1]"),
        ([1, "a"], "prompt[1]"),
        ([1, True], "prompt[1]"),
        ([[1], "a"], "prompt[1]"),
        (["a"] * 2049, "prompt"),
    ],
)
async def test_wrong_prompts_are_named(client: Any, engine: Any, prompt: Any, param: str) -> None:
    assert check(await client.post(COMPLETIONS, {"prompt": prompt}))["param"] == param
    assert engine.calls == []


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_missing_field_is_named(client: Any, path: str) -> None:
    error = check(await client.post(path, {"model": "fake"}))
    assert error["param"] == ("prompt" if path == COMPLETIONS else "messages")
    assert "nothing" in error["message"]


async def test_an_unknown_field_has_the_nearest_name(client: Any) -> None:
    error = check(await client.post(COMPLETIONS, {"prompt": "a", "max_token": 1}))
    assert error["param"] == "max_token"
    assert "did you mean 'max_tokens'?" in error["message"]


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        (COMPLETIONS, "suffix", "end"),
        (COMPLETIONS, "best_of", 2),
        (COMPLETIONS, "use_beam_search", True),
        (CHAT, "functions", [{"name": "f"}]),
        (CHAT, "modalities", ["text", "audio"]),
        (CHAT, "store", True),
        (CHAT, "echo", True),
    ],
)
async def test_fields_that_this_server_lacks_are_refused_by_name(client: Any, path: str, name: str, value: Any) -> None:
    body = {"prompt": "a"} if path == COMPLETIONS else {"messages": HI}
    error = check(await client.post(path, {**body, name: value}))
    assert error["param"] == name
    assert "a field that this server has" in error["message"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {"suffix": "", "best_of": 1, "user": "u", "response_format": {"type": "text"}}),
        (
            CHAT,
            {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"], "store": False},
        ),
        (CHAT, {"parallel_tool_calls": True, "service_tier": "auto", "metadata": None, "functions": None, "user": "u"}),
    ],
)
async def test_values_that_ask_for_nothing_are_accepted(client: Any, path: str, fields: dict[str, Any]) -> None:
    body = {"prompt": "a"} if path == COMPLETIONS else {"messages": HI}
    assert (await client.post(path, {**body, **fields})).status_code == 200


async def test_an_unknown_model_is_a_404(client: Any) -> None:
    error = check(await client.post(COMPLETIONS, {"model": "other", "prompt": "a"}), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert "fake, alias" in error["message"]


async def test_an_unknown_path_or_method_has_openais_form(client: Any) -> None:
    check(await client.get("/v1/nothing"), 404)
    answer = await client.get(COMPLETIONS)
    assert "/v1/completions answers POST" in check(answer, 405)["message"]
    assert answer.headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/v1/chat/completion", "did you mean '/v1/chat/completions'?"),
        ("/chat/completions", "did you mean '/v1/chat/completions'?"),
        ("/v1/load_lora_adapter", "there are no adapters"),
        ("/v1/audio/transcriptions", "text alone"),
    ],
)
async def test_an_unknown_path_has_the_nearest_or_what_there_is_instead(client: Any, path: str, expected: str) -> None:
    assert expected in check(await client.post(path, {}), 404)["message"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("guided_json", 'structured_outputs: {"json"'),
        ("request_id", "x-request-id"),
        ("functions", "tools"),
        ("use_beam_search", "no beam search"),
    ],
)
async def test_a_field_of_another_server_says_what_there_is_instead(client: Any, name: str, expected: str) -> None:
    error = check(await client.post(CHAT, {"messages": HI, name: [{}]}))
    assert error["param"] == name
    assert expected in error["message"]


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_other_content_types_are_refused(client: Any, engine: Any, content_type: str) -> None:
    answer = await client.post(COMPLETIONS, {"prompt": "a"}, **{"content-type": content_type})
    assert check(answer, 415)["param"] == "content-type"
    assert engine.calls == []


async def test_a_charset_in_the_content_type_is_fine(client: Any) -> None:
    answer = await client.post(COMPLETIONS, {"prompt": "a"}, **{"content-type": "Application/JSON; charset=utf-8"})
    assert answer.status_code == 200


async def test_a_body_over_the_limit_is_a_413(engine: Any, make_client: Any) -> None:
    client = make_client(engine, max_body_bytes=100)
    body = {"prompt": "a" * 100}
    check(await client.post(COMPLETIONS, body), 413)
    assert (await client.post(COMPLETIONS, {"prompt": "a" * 70})).status_code == 200


async def test_a_declared_length_over_the_limit_is_refused_unread(engine: Any, make_client: Any) -> None:
    client = make_client(engine, max_body_bytes=100)
    check(await client.post(COMPLETIONS, {"prompt": "a"}, **{"content-length": "1000000"}), 413)
    assert engine.calls == []


async def test_a_body_without_a_length_is_limited_too(engine: Any, make_client: Any) -> None:
    async def chunks() -> Any:
        yield b'{"prompt": "'
        for _ in range(10):
            yield b"a" * 50

    client = make_client(engine, max_body_bytes=100)
    answer = await client.send("POST", COMPLETIONS, content=chunks(), headers={"content-type": "application/json"})
    check(answer, 413)
    assert engine.calls == []


async def test_a_long_prompt_within_the_limit_reaches_the_engine_whole(client: Any, engine: Any) -> None:
    prompt = "a" * 10_000_000
    engine.errors[prompt] = ContextLengthError(
        "Prompt is longer than the context", on="prompt", found="x", expected="y", fix="z"
    )
    error = check(await client.post(COMPLETIONS, {"prompt": prompt}))
    assert "longer than the context" in error["message"]
    assert error["code"] == "context_length_exceeded", "by which clients know to shorten a conversation"


async def test_long_lists_of_wrong_values_are_refused_at_the_first(client: Any) -> None:
    error = check(await client.post(COMPLETIONS, {"prompt": "a", "stop_token_ids": ["x"] * 1_000_000}))
    assert len(error["message"]) < 1000
    error = check(await client.post(COMPLETIONS, {"prompt": [1] * 1_000_000 + ["x"]}))
    assert error["param"] == "prompt[1000000]"


async def test_a_broken_template_is_a_400(client: Any, engine: Any) -> None:
    def broken(messages: Any, **options: Any) -> str:
        raise TokenizerError("Chat template failed", on="fake", found="undefined", expected="a text", fix="repair it")

    engine.tokenizer.apply_chat_template = broken
    assert "Chat template failed" in check(await client.post(CHAT, {"messages": HI}))["message"]


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": HI})])
async def test_an_embedding_model_does_not_generate(make_client: Any, pooling_engine: Any, path: str, body: Any) -> None:
    error = check(await make_client(pooling_engine).post(path, body))
    assert "runner 'pooling'" in error["message"]
    assert "--runner generate" in error["message"]


async def test_a_generating_model_does_not_embed(client: Any) -> None:
    assert "runner 'generate'" in check(await client.post(EMBEDDINGS, {"input": "a"}))["message"]


async def test_a_dead_engine_is_a_503(client: Any, engine: Any, engine_dead: Any) -> None:
    engine.errors["a"] = engine_dead
    answer = await client.post(COMPLETIONS, {"prompt": "a"})
    assert answer.status_code == 503
    assert answer.json()["error"]["type"] == "service_unavailable"


async def test_an_unexpected_error_is_a_500_without_internals(client: Any, engine: Any, caplog: Any) -> None:
    engine.errors["a"] = ZeroDivisionError("secret")
    answer = await client.post(COMPLETIONS, {"prompt": "a"}, **{"x-request-id": "r-1"})
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert answer.headers["x-request-id"] == "r-1"
    assert "secret" in caplog.text, "the log has the cause"


async def test_one_bad_request_disturbs_no_other(client: Any, engine: Any) -> None:
    import asyncio

    engine.gate = asyncio.Event()
    good = asyncio.create_task(client.post(COMPLETIONS, {"prompt": "a"}))
    while not engine.calls:
        await asyncio.sleep(0)
    for body in (b"{", json.dumps({"prompt": "a", "n": 0}).encode(), b'{"prompt": "\\ud800"}'):
        check(await client.post(COMPLETIONS, body))
    engine.gate.set()
    assert (await good).json()["choices"][0]["text"] == "Hello wörld"


@pytest.mark.parametrize(
    ("value", "expected"), [(["x"] * 65, "at most 64 items"), ([1], "a valid string"), ({"a": 1}, "a valid list")]
)
async def test_a_field_of_several_types_says_what_is_wrong_with_the_value(client: Any, value: object, expected: str) -> None:
    assert expected in check(await client.post(COMPLETIONS, {"prompt": "a", "stop": value}))["message"]


@pytest.mark.parametrize("number", [-1, 21])
async def test_top_logprobs_out_of_range_is_refused_under_its_own_name(client: Any, number: int) -> None:
    body = {"messages": HI, "logprobs": True, "top_logprobs": number}
    assert check(await client.post(CHAT, body))["param"] == "top_logprobs"
