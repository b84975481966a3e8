"""What every request passes: limits on headers and time, keys, origins, and what may be logged."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from vllm_core.errors import ConfigError

pytestmark = pytest.mark.anyio

COMPLETIONS = "/v1/completions"


async def test_more_sequences_than_may_wait_are_a_429(engine: Any, make_client: Any) -> None:
    engine.gate, engine.max_num_seqs = asyncio.Event(), 1
    client = make_client(engine, max_queued_requests=1)
    running = [asyncio.create_task(client.post(COMPLETIONS, {"prompt": "a"})) for _ in range(2)]
    while len(engine.calls) < 2:
        await asyncio.sleep(0)
    for stream in (False, True):
        answer = await client.post(COMPLETIONS, {"prompt": "a", "stream": stream})
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["type"] == "rate_limit_error"
    engine.gate.set()
    assert [one.status_code for one in await asyncio.gather(*running)] == [200, 200]
    assert (await client.post(COMPLETIONS, {"prompt": "a"})).status_code == 200


async def test_a_request_that_nobody_started_to_read_holds_no_place(engine: Any, make_client: Any, leaver: Any) -> None:
    engine.first_gate, engine.max_num_seqs = asyncio.Event(), 1
    client, leave = make_client(engine, max_queued_requests=0), asyncio.Event()
    leave.set()
    await leaver(client.app, COMPLETIONS, {"prompt": "a", "stream": True}, leave)
    engine.first_gate.set()
    assert (await client.post(COMPLETIONS, {"prompt": "a"})).status_code == 200


@pytest.mark.parametrize(("asked", "limit", "expected"), [("5", None, 5), ("5", 2.0, 2), ("1", 2.0, 1), (None, 2.0, 2)])
async def test_the_sooner_of_two_deadlines_reaches_the_engine(
    engine: Any, make_client: Any, asked: str | None, limit: float | None, expected: float
) -> None:
    headers = {} if asked is None else {"x-request-timeout-s": asked}
    before = asyncio.get_running_loop().time()
    await make_client(engine, request_timeout_s=limit).post(COMPLETIONS, {"prompt": "a"}, **headers)
    assert before + expected <= engine.deadlines[0] <= asyncio.get_running_loop().time() + expected


async def test_without_a_deadline_there_is_none(engine: Any, client: Any) -> None:
    await client.post(COMPLETIONS, {"prompt": "a"})
    assert engine.deadlines == [None]


@pytest.mark.parametrize("text", ["soon", "-1", "0", "nan", "inf", "1" * 40, ""])
async def test_a_deadline_that_is_no_time_is_refused(client: Any, engine: Any, text: str) -> None:
    answer = await client.post(COMPLETIONS, {"prompt": "a"}, **{"x-request-timeout-s": text})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-request-timeout-s")
    assert engine.calls == []


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([(f"x-{i}", "y") for i in range(20)], 431),
        ([("x-long", "y" * 2000)], 431),
        ([("transfer-encoding", "chunked"), ("content-length", "2")], 400),
    ],
)
async def test_headers_that_are_too_many_too_long_or_ambiguous_are_refused(
    engine: Any, make_client: Any, headers: list[tuple[str, str]], status: int
) -> None:
    client = make_client(engine, max_headers=16, max_header_bytes=1000)
    answer = await client.send("GET", "/health", headers=headers)
    assert (answer.status_code, answer.headers["connection"]) == (status, "close")


async def test_what_is_not_a_probe_asks_for_a_key(engine: Any, make_client: Any) -> None:
    client = make_client(engine, api_keys=("key-1",))
    paths = {*client.app.openapi()["paths"], "/plan", "/openapi.json", "/anything", "/health/", "/web", "//v1/models"}
    assert "/v1/completions" in paths
    for path in paths:
        if path in ("/", "/health", "/health/live", "/health/ready", "/ping", "/version", "/metrics", "/favicon.ico"):
            continue
        assert (await client.send("POST", path)).status_code == 401, path


async def test_a_key_may_also_come_as_x_api_key(engine: Any, make_client: Any) -> None:
    client = make_client(engine, api_keys=("key-1",))
    assert (await client.get("/v1/models", headers={"x-api-key": "key-1"})).status_code == 200
    assert (await client.get("/v1/models", headers={"x-api-key": "key-2"})).status_code == 401


async def test_under_a_proxys_path_probes_stay_open_and_the_rest_closed(engine: Any, make_client: Any) -> None:
    client = make_client(engine, api_keys=("key-1",), root_path="/llm")
    assert (await client.get("/health")).status_code == 200
    assert (await client.get("/v1/models")).status_code == 401


async def test_no_other_origin_reads_answers_unless_it_is_named(engine: Any, make_client: Any) -> None:
    asks = {"origin": "https://page.example", "access-control-request-method": "POST"}
    closed = make_client(engine)
    assert "access-control-allow-origin" not in (await closed.get("/health", headers=asks)).headers
    assert (await closed.send("OPTIONS", COMPLETIONS, headers=asks)).status_code == 405
    named = make_client(engine, allowed_origins=("https://page.example",), api_keys=("key-1",))
    answer = await named.send("OPTIONS", COMPLETIONS, headers=asks)
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "https://page.example")
    refused = await named.get("/v1/models", headers=asks)
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "https://page.example")
    other = await named.get("/health", headers={"origin": "https://other.example"})
    assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize(
    "options", [{"fair_share": True, "api_keys": ("one",)}, {"allow_credentials": True, "allowed_origins": ("*",)}]
)
def test_options_that_contradict_each_other_are_refused(engine: Any, make_client: Any, options: Any) -> None:
    with pytest.raises(ConfigError):
        make_client(engine, **options)


async def test_contents_are_logged_only_for_those_who_ask(engine: Any, make_client: Any, caplog: Any) -> None:
    caplog.set_level(logging.INFO, logger="vllm_core.serve")
    await make_client(engine).post(COMPLETIONS, {"prompt": "secret stuff"})
    assert "secret" not in caplog.text
    await make_client(engine, log_requests=True, max_log_len=6).post(COMPLETIONS, {"prompt": "secret stuff"})
    assert "'secret'" in caplog.text
    assert "stuff" not in caplog.text


async def test_keys_share_fairly(engine: Any, make_client: Any) -> None:
    engine.max_num_seqs, engine.gate = 1, asyncio.Event()
    client = make_client(engine, api_keys=("key-1", "key-2"), fair_share=True)

    async def send(key: str, prompt: str) -> None:
        await client.post(COMPLETIONS, {"prompt": prompt}, authorization=f"Bearer {key}")

    tasks = []
    for key, prompt in (("key-1", "a"), ("key-1", "b"), ("key-1", "c"), ("key-2", "d")):
        tasks.append(asyncio.create_task(send(key, prompt)))
        await asyncio.sleep(0.01)
    assert len(engine.calls) == 1, "the engine has what it can run, the rest waits in the server"
    engine.gate.set()
    await asyncio.gather(*tasks)
    assert [call[0] for call in engine.calls] == ["a", "d", "b", "c"]


@pytest.mark.parametrize(
    "body",
    [
        '{"prompt": [' + "1," * 200 + "1]}",
        '{"prompt": "a", "x": [' + "[]," * 80 + "[]]}",
        '{"prompt": "' + '\\"' * 200 + '", "x": [' + "1," * 200 + "1]}",
        '{"prompt": "' + "\\\\" * 199 + '", "x": [' + "1," * 200 + "1]}",
    ],
)
async def test_more_values_than_the_loop_can_make_at_once_are_refused(
    client: Any, engine: Any, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    """While a body is decoded nobody else is served."""
    monkeypatch.setattr("vllm_core.serve.body.MOST", {b",": 100, b":": 50, b"[": 50, b"{": 50})
    answer = await client.post(COMPLETIONS, body.encode())
    assert (answer.status_code, answer.json()["error"]["param"]) == (413, "body")
    assert "too many values" in answer.json()["error"]["message"]
    assert engine.calls == []


async def test_marks_within_texts_are_no_values(client: Any, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_core.serve.body.MOST", {b",": 100, b":": 50, b"[": 50, b"{": 50})
    text = 'f(a, b)[0] = {"x": "\\", \\"y": 1}; ' * 60
    answer = await client.post(COMPLETIONS, {"prompt": text})
    assert answer.status_code == 200
    assert engine.calls[0][0] == text
