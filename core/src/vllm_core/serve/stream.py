"""Server-sent events, and requests that end with their client."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from vllm_core.errors import VLLMCoreError
from vllm_core.outputs import CompletionOutput, Logprob, RequestOutput
from vllm_core.serve.errors import INTERNAL, ClientGoneError, ErrorAnswer, answer_of

log = logging.getLogger("vllm_core.serve")

T = TypeVar("T")
Outputs = AsyncGenerator[tuple[int, RequestOutput], None]

DONE = b"data: [DONE]\n\n"

PIECE = "vllm_core.piece"
"""Extension of an HTTP scope: sends a piece of a body of unknown length whose head has been sent. See `protocol`."""

_encode = msgspec.json.Encoder().encode


def event(body: object) -> bytes:
    """One event; JSON has no raw line breaks, so it is a single line."""
    return b"data: " + _encode(body) + b"\n\n"


def named_event(name: str, body: object) -> bytes:
    """One event with a name, as other APIs than chat completions have them."""
    return f"event: {name}\n".encode() + event(body)


async def until_gone(receive: Receive, work: Awaitable[T]) -> T:
    """Await ``work``, and cancel it when the client closes the connection.

    The request's body must have been read. Raises ClientGoneError.
    """
    task, watcher = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def merge(sources: Sequence[AsyncGenerator[RequestOutput, None]]) -> Outputs:
    """Yield (index of the source, output) as outputs come; all sources end together, also by an error of one."""
    if len(sources) == 1:
        async with aclosing(sources[0]) as source:
            async for output in source:
                yield 0, output
        return
    pending = {asyncio.ensure_future(anext(source, None)): index for index, source in enumerate(sources)}
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=pending.__getitem__):
                index, found = pending.pop(task), task.result()
                if found is not None:
                    pending[asyncio.ensure_future(anext(sources[index], None))] = index
                    yield index, found
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for source in sources:
            await source.aclose()


async def collect(outputs: Outputs, count: int) -> list[RequestOutput]:
    """The last output of each of ``count`` sources."""
    async with aclosing(outputs):
        last = {index: output async for index, output in outputs}
    return [last[index] for index in range(count)]


async def together(asked: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All results, in order; the first error ends the others."""
    tasks = [asyncio.ensure_future(one) for one in asked]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def opened(receive: Receive, outputs: Outputs) -> Outputs:
    """Wait for the first output, so that what is wrong with a request is an HTTP status and not an event."""
    first = await until_gone(receive, anext(outputs))

    async def all_of_them() -> Outputs:
        async with aclosing(outputs):
            yield first
            async for item in outputs:
                yield item

    return all_of_them()


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new of one sequence."""

    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: int | str | None


class Cursor:
    """How much of a sequence has been sent. Outputs are cumulative and may skip steps."""

    __slots__ = ("finished", "offset", "text", "tokens")

    def __init__(self) -> None:
        self.text = 0
        self.tokens = 0
        self.offset = 0
        self.finished = False

    def advance(self, out: CompletionOutput, *, every_token: bool) -> Delta | None:
        """The news, or None. Tokens without text (part of a character) wait for it, unless ``every_token``."""
        text, ids = out.text[self.text :], out.token_ids[self.tokens :]
        if self.finished or not (text or out.finished or (every_token and ids)):
            return None
        logprobs = out.logprobs[self.tokens :] if out.logprobs is not None else None
        self.text, self.tokens, self.finished = len(out.text), len(out.token_ids), out.finished
        return Delta(text, ids, logprobs, out.finish_reason, out.stop_reason)


class EventStream(Response):
    """Sends events as they come. Closes their generator at the end, or when the client goes."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        headers: Mapping[str, str] | None = None,
        *,
        failed: Callable[[ErrorAnswer], bytes] = event,
        end: bytes = DONE,
    ) -> None:
        """``failed`` writes the event of an error, ``end`` is what follows the last event."""
        self.status_code = 200
        self.background = None
        self._events, self._failed, self._end = events, failed, end
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all of it."""
        async with aclosing(self._events):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            with suppress(ClientGoneError):  # the request is aborted by closing the events; nobody waits for an answer
                await until_gone(receive, self._pump(scope, send))

    async def _pump(self, scope: Scope, send: Send) -> None:
        async def through_asgi(data: bytes) -> None:
            await send(_body(data, more=True))

        # Once a token: past middleware and HTTP library where the connection has a shorter way.
        piece: Callable[[bytes], Awaitable[None]] = scope.get("extensions", {}).get(PIECE, through_asgi)
        try:
            async for data in self._events:
                await piece(data)
        except VLLMCoreError as error:
            await send(_body(self._failed(answer_of(error)), more=True))
        except Exception:  # the status is sent: the client learns of it in the stream
            log.exception("stream failed")
            await send(_body(self._failed(INTERNAL), more=True))
        await send(_body(self._end, more=False))


def _body(data: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}
