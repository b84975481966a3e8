"""``POST /v1/responses``, without storage: whole, or as the events of OpenAI's API."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response

from vllm_core.outputs import RequestOutput
from vllm_core.serve import schema
from vllm_core.serve.context import Context, fail_on_error, new_id
from vllm_core.serve.conversation import AnswerReader, Turn, open_turn
from vllm_core.serve.errors import ErrorAnswer, json_response
from vllm_core.serve.responses_input import asked_of
from vllm_core.serve.stream import Cursor, EventStream, Outputs, collect, named_event, opened, until_gone
from vllm_core.serve.tools.pieces import Arguments, Call, Piece, Reasoning, Text

Item = dict[str, Any]
Event = tuple[str, dict[str, Any]]


def router(context: Context) -> APIRouter:
    """The endpoint."""
    api = APIRouter()

    @api.post("/v1/responses", openapi_extra=schema.openapi(schema.ResponsesRequest))
    async def responses(request: Request) -> Response:
        body = await context.read(request, schema.ResponsesRequest, "generate")
        turn = await open_turn(context, asked_of(body))
        changes = {"temperature": body.temperature, "top_p": body.top_p, "max_tokens": body.max_output_tokens}
        params = context.chat_defaults().replace(**{name: value for name, value in changes.items() if value is not None})
        answer = _Answer(context, body, turn)
        outputs = context.start(body, [turn.prompt], turn.params(params), answer.id, special=False)
        if body.stream:
            return EventStream(answer.events(await opened(request.receive, outputs)), failed=answer.failed, end=b"")
        finals = await until_gone(request.receive, collect(outputs, 1))
        return json_response(answer.whole(finals[0]))

    return api


class _Answer:
    """One response, whole or in events."""

    def __init__(self, context: Context, body: schema.ResponsesRequest, turn: Turn) -> None:
        self.id = new_id("resp")
        self._body, self._turn = body, turn
        self._created, self._model = time.time(), context.model_name(body)
        self._items = _Items()
        self._reader = turn.reader()
        self._cursor = Cursor()
        self._reasoning_tokens = 0
        self._events = 0

    def whole(self, final: RequestOutput) -> dict[str, Any]:
        """The answer at once."""
        for _ in self._take(final):
            pass
        return self._response(final)

    async def events(self, outputs: Outputs) -> AsyncGenerator[bytes, None]:
        """The answer in pieces."""
        yield self._event("response.created", {"response": self._response(None)})
        yield self._event("response.in_progress", {"response": self._response(None)})
        async with aclosing(outputs):
            async for _, output in outputs:
                for name, body in self._take(output):
                    yield self._event(name, body)
        response = self._response(output)
        yield self._event(f"response.{response['status']}", {"response": response})

    def failed(self, error: ErrorAnswer) -> bytes:
        """The event of an error that ends the events."""
        return self._event("error", {"code": error.error.type, "message": error.error.message, "param": error.error.param})

    def _event(self, name: str, body: Mapping[str, Any]) -> bytes:
        self._events += 1
        return named_event(name, {"type": name, "sequence_number": self._events - 1, **body})

    def _take(self, output: RequestOutput) -> Iterator[Event]:
        fail_on_error(output)
        out = output.outputs[0]
        delta = self._cursor.advance(out, every_token=False)
        if delta is None:
            return
        reader: AnswerReader = self._reader
        for piece in reader.push(delta.text, last=out.finished):
            yield from self._items.take(piece)
        if reader.is_reasoning:
            self._reasoning_tokens = len(out.token_ids)
        if out.finished:
            yield from self._items.close("completed" if out.finish_reason == "stop" else "incomplete")

    def _response(self, output: RequestOutput | None) -> dict[str, Any]:
        body = self._body
        length = output is not None and output.outputs[0].finish_reason == "length"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": "in_progress" if output is None else "incomplete" if length else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if length else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": [] if output is None else self._items.done,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": body.reasoning or {"effort": None, "summary": None},
            "store": False,
            "temperature": body.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None if output is None else self._usage(output),
        }

    def _usage(self, output: RequestOutput) -> dict[str, Any]:
        read, written = len(output.prompt_token_ids), len(output.outputs[0].token_ids)
        return {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": output.num_cached_tokens},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
            "total_tokens": read + written,
        }


class _Items:
    """Output items as they grow. At most one is open."""

    def __init__(self) -> None:
        self.done: list[Item] = []
        self._open: Item | None = None
        self._call = -1

    def take(self, piece: Piece) -> Iterator[Event]:
        """Add a piece; yields what it brings."""
        if isinstance(piece, Call):
            yield from self.close()
            self._call = piece.index
            yield self._begin(
                {"type": "function_call", "id": _id("fc"), "call_id": piece.id, "name": piece.name, "arguments": ""}
            )
        elif isinstance(piece, Arguments):
            if self._open is not None and self._call == piece.index:
                self._open["arguments"] += piece.text
                yield "response.function_call_arguments.delta", {**self._place(), "delta": piece.text}
        else:
            yield from self._text(piece)

    def _text(self, piece: Text | Reasoning) -> Iterator[Event]:
        kind = "message" if isinstance(piece, Text) else "reasoning"
        if self._open is None or self._open["type"] != kind:
            yield from self.close()
            item: Item = {"type": kind, "id": _id("msg" if kind == "message" else "rs"), "content": []}
            more: Item = {"role": "assistant"} if kind == "message" else {"summary": []}
            item.update(more)
            yield self._begin(item)
            part = _text_part("") if kind == "message" else {"type": "reasoning_text", "text": ""}
            assert self._open is not None, "just begun"
            self._open["content"].append(part)
            yield "response.content_part.added", {**self._place(), "content_index": 0, "part": dict(part)}
        assert self._open is not None, "just begun"
        self._open["content"][0]["text"] += piece.text
        body = {**self._place(), "content_index": 0, "delta": piece.text}
        if kind == "message":
            body["logprobs"] = []
        yield f"response.{'output' if kind == 'message' else 'reasoning'}_text.delta", body

    def close(self, status: str = "completed") -> Iterator[Event]:
        """End the open item, if there is one; yields its end."""
        item, self._open = self._open, None
        if item is None:
            return
        item["status"] = status
        place = {"item_id": item["id"], "output_index": len(self.done)}
        if item["type"] == "function_call":
            body = {**place, "name": item["name"], "arguments": item["arguments"]}
            yield "response.function_call_arguments.done", body
        else:
            part = item["content"][0]
            name = "output_text" if item["type"] == "message" else "reasoning_text"
            extra: Item = {"logprobs": []} if name == "output_text" else {}
            yield f"response.{name}.done", {**place, "content_index": 0, "text": part["text"], **extra}
            yield "response.content_part.done", {**place, "content_index": 0, "part": part}
        self.done.append(item)
        yield "response.output_item.done", {"output_index": place["output_index"], "item": item}

    def _begin(self, item: Item) -> Event:
        item["status"] = "in_progress"
        self._open = item
        added = {**item, "content": []} if "content" in item else dict(item)
        return "response.output_item.added", {"output_index": len(self.done), "item": added}

    def _place(self) -> dict[str, Any]:
        assert self._open is not None, "an item is open"
        return {"item_id": self._open["id"], "output_index": len(self.done)}


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
