"""``POST /v1/messages`` and ``/v1/messages/count_tokens``, as clients of Anthropic's API send them."""

from __future__ import annotations

import asyncio
import functools
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response

from vllm_core.errors import VLLMCoreError
from vllm_core.outputs import CompletionOutput, RequestOutput
from vllm_core.serve import schema
from vllm_core.serve.anthropic_input import asked_of
from vllm_core.serve.body import decode
from vllm_core.serve.context import Context, fail_on_error, new_id
from vllm_core.serve.conversation import Turn, open_turn
from vllm_core.serve.errors import ErrorAnswer, answer_of, headers_of, json_response, status_of
from vllm_core.serve.stream import Cursor, EventStream, Outputs, collect, named_event, opened, until_gone
from vllm_core.serve.tokens import MAX_TOKENS
from vllm_core.serve.tools.pieces import Arguments, Call, Piece, Reasoning, Text

Endpoint = Callable[[Request], Awaitable[Response]]
Event = tuple[str, dict[str, Any]]

_TYPES = {
    400: "invalid_request_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_STATUS = {"invalid_request_error": 400, "service_unavailable": 503, "timeout": 504}
"""Of what ends a stream, whose status has been sent."""
_REASONS = {"stop": "end_turn", "length": "max_tokens"}


def router(context: Context) -> APIRouter:
    """The endpoints."""
    api = APIRouter()

    @api.post("/v1/messages", openapi_extra=schema.openapi(schema.MessagesRequest))
    @_in_its_form
    async def messages(request: Request) -> Response:
        body = await context.read(request, schema.MessagesRequest, "generate")
        turn = await open_turn(context, asked_of(body))
        changes = {"temperature": body.temperature, "top_p": body.top_p, "top_k": body.top_k, "stop": body.stop_sequences}
        given = {name: value for name, value in changes.items() if value is not None}
        params = turn.params(context.defaults().replace(max_tokens=body.max_tokens, **given))
        answer = _Answer(context, body, turn)
        outputs = context.start(body, [turn.prompt], params, answer.id, special=False)
        if body.stream:
            return EventStream(answer.events(await opened(request.receive, outputs)), failed=_failed, end=b"")
        finals = await until_gone(request.receive, collect(outputs, 1))
        return json_response(answer.whole(finals[0]))

    @api.post("/v1/messages/count_tokens", openapi_extra=schema.openapi(schema.CountRequest))
    @_in_its_form
    async def count_tokens(request: Request) -> Response:
        body = await context.read(request, schema.CountRequest, "generate")
        turn = await open_turn(context, asked_of(body))
        ids = await asyncio.to_thread(context.tokenizer("messages").encode, turn.prompt, False, MAX_TOKENS)
        return json_response({"input_tokens": len(ids)})

    return api


def _in_its_form(endpoint: Endpoint) -> Endpoint:
    """What goes wrong in the form of this API."""

    @functools.wraps(endpoint)
    async def wrapped(request: Request) -> Response:
        try:
            return await endpoint(request)
        except VLLMCoreError as error:
            status = status_of(error)
            answer = json_response(_error(answer_of(error), status), status)
            answer.headers.update(headers_of(error))
            return answer

    return wrapped


def _error(answer: ErrorAnswer, status: int) -> dict[str, Any]:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": answer.error.message, "param": answer.error.param}}


def _failed(answer: ErrorAnswer) -> bytes:
    return named_event("error", _error(answer, _STATUS.get(answer.error.type, 500)))


class _Answer:
    """One message, whole or in events."""

    def __init__(self, context: Context, body: schema.MessagesRequest, turn: Turn) -> None:
        self.id = new_id("msg")
        self._model = context.model_name(body)
        self._reader, self._cursor = turn.reader(), Cursor()
        self._blocks = _Blocks()

    def whole(self, final: RequestOutput) -> dict[str, Any]:
        """The answer at once."""
        for _ in self._take(final):
            pass
        out = final.outputs[0]
        blocks = self._blocks.done or [{"type": "text", "text": ""}]
        return {**self._message(blocks), **self._end(out), "usage": _usage(final)}

    async def events(self, outputs: Outputs) -> AsyncGenerator[bytes, None]:
        """The answer in pieces."""
        begun = False
        async with aclosing(outputs):
            async for _, output in outputs:
                if not begun:
                    begun = True
                    start = {**self._message([]), "stop_reason": None, "stop_sequence": None, "usage": _usage(output)}
                    yield named_event("message_start", {"type": "message_start", "message": start})
                for name, body in self._take(output):
                    yield named_event(name, {"type": name, **body})
        end = {"type": "message_delta", "delta": self._end(output.outputs[0]), "usage": _usage(output)}
        yield named_event("message_delta", end)
        yield named_event("message_stop", {"type": "message_stop"})

    def _take(self, output: RequestOutput) -> Iterator[Event]:
        fail_on_error(output)
        out = output.outputs[0]
        delta = self._cursor.advance(out, every_token=False)
        if delta is None:
            return
        for piece in self._reader.push(delta.text, last=out.finished):
            yield from self._blocks.take(piece)
        if out.finished:
            yield from self._blocks.close()

    def _message(self, blocks: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "type": "message", "role": "assistant", "model": self._model, "content": blocks}

    def _end(self, out: CompletionOutput) -> dict[str, Any]:
        if isinstance(out.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": out.stop_reason}
        reason = _REASONS.get(out.finish_reason or "", "end_turn")
        return {"stop_reason": "tool_use" if self._reader.calls and reason == "end_turn" else reason, "stop_sequence": None}


class _Blocks:
    """Content blocks as they grow. At most one is open."""

    def __init__(self) -> None:
        self.done: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._input = ""

    def take(self, piece: Piece) -> Iterator[Event]:
        """Add a piece; yields what it brings."""
        if isinstance(piece, Call):
            yield from self._begin(
                {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex[:24]}", "name": piece.name, "input": {}}
            )
            self._input = ""
        elif isinstance(piece, Arguments):
            self._input += piece.text
            yield self._delta({"type": "input_json_delta", "partial_json": piece.text})
        elif isinstance(piece, Reasoning):
            yield from self._text("thinking", "thinking", piece, {"signature": ""})
        else:
            yield from self._text("text", "text", piece, {})

    def _text(self, kind: str, name: str, piece: Text | Reasoning, more: dict[str, Any]) -> Iterator[Event]:
        if self._open is None or self._open["type"] != kind:
            yield from self._begin({"type": kind, name: "", **more})
        assert self._open is not None, "just begun"
        self._open[name] += piece.text
        yield self._delta({"type": f"{kind}_delta", name: piece.text})

    def close(self) -> Iterator[Event]:
        """End the open block, if there is one; yields its end."""
        block, self._open = self._open, None
        if block is None:
            return
        if block["type"] == "tool_use":
            block["input"] = _input(self._input)
        self.done.append(block)
        yield "content_block_stop", {"index": len(self.done) - 1}

    def _begin(self, block: dict[str, Any]) -> Iterator[Event]:
        yield from self.close()
        self._open = block
        yield "content_block_start", {"index": len(self.done), "content_block": dict(block)}

    def _delta(self, delta: dict[str, Any]) -> Event:
        return "content_block_delta", {"index": len(self.done), "delta": delta}


def _input(text: str) -> object:
    """Arguments as an object. An answer that was cut leaves text that is none: it is passed on under one name."""
    try:
        return decode(text.encode()) if text else {}
    except VLLMCoreError:
        return {"incomplete": text}


def _usage(output: RequestOutput) -> dict[str, int]:
    cached = output.num_cached_tokens
    return {
        "input_tokens": len(output.prompt_token_ids) - cached,
        "output_tokens": len(output.outputs[0].token_ids),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
    }
