"""Clients that go away, merged sources, and what a cursor sends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from vllm_core.outputs import CompletionOutput, Logprob, RequestOutput
from vllm_core.serve.errors import ClientGoneError
from vllm_core.serve.stream import Cursor, collect, merge, until_gone

pytestmark = pytest.mark.anyio


async def never() -> dict[str, Any]:
    await asyncio.Event().wait()
    raise AssertionError


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/completions", {"prompt": ["a", "b"], "n": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
    ],
)
async def test_a_client_that_goes_aborts_its_requests(
    client: Any, engine: Any, leaver: Any, path: str, body: dict[str, Any], stream: bool
) -> None:
    engine.gate, leave = asyncio.Event(), asyncio.Event()
    asyncio.get_running_loop().call_later(0.05, leave.set)
    sent = await leaver(client.app, path, {**body, "stream": stream}, leave)
    assert sorted(engine.closed) == sorted(call[2] for call in engine.calls)
    assert engine.closed
    assert not any(b"[DONE]" in message.get("body", b"") for message in sent)


async def test_a_client_that_goes_before_the_first_token_aborts_too(client: Any, engine: Any, leaver: Any) -> None:
    leave = asyncio.Event()
    engine.first_gate = asyncio.Event()
    asyncio.get_running_loop().call_later(0.05, leave.set)
    sent = await leaver(client.app, "/v1/completions", {"prompt": "a", "stream": True}, leave)
    assert engine.closed == [call[2] for call in engine.calls]
    assert len(engine.closed) == 1
    assert sent[0]["status"] == 499, "nothing was streamed yet"


async def test_a_client_that_goes_disturbs_no_other(client: Any, engine: Any, leaver: Any) -> None:
    engine.gate, leave = asyncio.Event(), asyncio.Event()
    other = asyncio.create_task(client.post("/v1/completions", {"prompt": "b"}))
    asyncio.get_running_loop().call_later(0.05, leave.set)
    await leaver(client.app, "/v1/completions", {"prompt": "a"}, leave)
    engine.gate.set()
    assert (await other).json()["choices"][0]["text"] == "Hello wörld"
    assert len(engine.closed) == 1


async def test_work_ends_with_the_client() -> None:
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def gone() -> dict[str, Any]:
        await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    with pytest.raises(ClientGoneError):
        await until_gone(gone, work())
    assert ended.is_set()


async def test_work_that_is_done_wins_and_its_error_is_raised() -> None:
    async def broken() -> None:
        raise ValueError("mine")

    assert await until_gone(never, asyncio.sleep(0, "done")) == "done"
    with pytest.raises(ValueError, match="mine"):
        await until_gone(never, broken())


class Source:
    """Yields as many outputs as it is told to; remembers that it was closed."""

    def __init__(self, name: str, count: int, error: Exception | None = None) -> None:
        self.name, self.count, self.error, self.closed = name, count, error, False

    async def run(self) -> AsyncGenerator[RequestOutput, None]:
        try:
            for step in range(self.count):
                await asyncio.sleep(0)
                yield RequestOutput(self.name, None, [], [], step == self.count - 1)
            if self.error is not None:
                raise self.error
        finally:
            self.closed = True


@pytest.mark.parametrize("counts", [(1,), (3,), (1, 4), (2, 0, 5)])
async def test_merging_loses_no_output_and_keeps_each_sources_order(counts: tuple[int, ...]) -> None:
    sources = [Source(str(i), count) for i, count in enumerate(counts)]
    seen = [(index, output.request_id, output.finished) async for index, output in merge([s.run() for s in sources])]
    for i, count in enumerate(counts):
        assert [end for index, name, end in seen if index == i and name == str(i)] == [False] * (count - 1) + [True] * min(
            count, 1
        )
    assert all(source.closed for source in sources)


@pytest.mark.parametrize("others", [0, 2])
async def test_an_error_of_one_source_closes_all(others: int) -> None:
    sources = [Source("bad", 1, ValueError("mine")), *(Source(str(i), 100) for i in range(others))]
    with pytest.raises(ValueError, match="mine"):
        await collect(merge([s.run() for s in sources]), len(sources))
    assert all(source.closed for source in sources)


@pytest.mark.parametrize("others", [0, 2])
async def test_closing_the_merged_stream_closes_all(others: int) -> None:
    sources = [Source(str(i), 100) for i in range(others + 1)]
    merged = merge([s.run() for s in sources])
    await anext(merged)
    await merged.aclose()
    assert all(source.closed for source in sources)


async def test_a_cursor_sends_everything_once_whatever_was_skipped() -> None:
    out, cursor = CompletionOutput(0, "", [], logprobs=[]), Cursor()
    sent, tokens, logprobs = "", [], []
    for text, ids in [("a", [1]), ("a", [1, 2]), ("abc", [1, 2, 3]), ("abcdef", [1, 2, 3, 4, 5])]:
        out.text, out.token_ids = text, ids
        out.logprobs = [{i: Logprob(-i, 1)} for i in ids]
        delta = cursor.advance(out, every_token=False)
        if delta is not None:
            sent, tokens, logprobs = sent + delta.text, tokens + delta.token_ids, logprobs + (delta.logprobs or [])
    assert (sent, tokens, [next(iter(entry)) for entry in logprobs]) == ("abcdef", [1, 2, 3, 4, 5], [1, 2, 3, 4, 5])


async def test_a_cursor_holds_tokens_without_text_unless_asked() -> None:
    out = CompletionOutput(0, "", [1])
    assert Cursor().advance(out, every_token=False) is None
    delta = Cursor().advance(out, every_token=True)
    assert delta is not None
    assert delta.token_ids == [1]


async def test_a_cursor_sends_the_end_once_even_without_text() -> None:
    out, cursor = CompletionOutput(0, "", [], finish_reason="length"), Cursor()
    delta = cursor.advance(out, every_token=False)
    assert delta is not None
    assert delta.finish_reason == "length"
    assert cursor.advance(out, every_token=False) is None
