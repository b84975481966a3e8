"""``POST /v1/chat/completions``."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType

from vllm_core.outputs import CompletionOutput, RequestOutput
from vllm_core.sampling_params import SamplingParams
from vllm_core.serve import responses, schema
from vllm_core.serve.context import Context, fail_on_error, new_id
from vllm_core.serve.conversation import AnswerReader, Asked, Turn, calls, open_turn, texts
from vllm_core.serve.errors import json_response
from vllm_core.serve.messages import read_messages
from vllm_core.serve.stream import Cursor, Delta, EventStream, Outputs, collect, event, opened, until_gone
from vllm_core.serve.structure import read_structure
from vllm_core.serve.tools.offered import read_tools
from vllm_core.serve.tools.pieces import Arguments, Call, Piece


def router(context: Context) -> APIRouter:
    """The endpoint."""
    api = APIRouter()

    @api.post("/v1/chat/completions", openapi_extra=schema.openapi(schema.ChatRequest))
    async def chat_completions(request: Request) -> Response:
        body = await context.read(request, schema.ChatRequest, "generate")
        params = _params(context, body)
        usage = body.streamed_usage
        turn = await open_turn(context, asked_of(body))
        answer = _Answer(context, body, turn, turn.params(params))
        outputs = context.start(body, [turn.prompt], answer.params, answer.id, special=False)
        if body.stream:
            return EventStream(answer.events(await opened(request.receive, outputs), usage))
        finals = await until_gone(request.receive, collect(outputs, 1))
        return json_response(answer.whole(finals[0]))

    return api


def asked_of(body: schema.ChatRequest) -> Asked:
    """The conversation of a request. Raises RequestError."""
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
    going_on = bool(body.continue_final_message)
    return Asked(
        messages=read_messages(body.messages),
        tools=read_tools(body.tools, body.tool_choice, body.parallel_tool_calls),
        structure=read_structure(body.response_format, body.structured_outputs),
        # Both by name is a contradiction, which `open_turn` refuses.
        add_generation_prompt=bool(body.add_generation_prompt) if going_on else body.add_generation_prompt is not False,
        continue_final_message=going_on,
        chat_template=body.chat_template,
        variables=variables,
    )


def _params(context: Context, body: schema.ChatRequest) -> SamplingParams:
    """Without a limit, the answer may take what the context has left."""
    if body.top_logprobs is not None and not body.logprobs:
        raise schema.refused("top_logprobs", "top_logprobs without logprobs", "logprobs: true", "send logprobs: true")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return body.sampling(context.chat_defaults(), max_tokens=body.limit, logprobs=logprobs)


class _Answer:
    """One request's answer, whole or in pieces."""

    def __init__(self, context: Context, body: schema.ChatRequest, turn: Turn, params: SamplingParams) -> None:
        self.params = params
        self.id = new_id("chatcmpl")
        self._turn = turn
        self._created = int(time.time())
        self._model = context.model_name(body)
        self._with_ids = bool(body.return_token_ids)
        self._named = body.tool_choice is not None and not isinstance(body.tool_choice, str)
        self._shows_reasoning = body.include_reasoning is not False
        self._reasoning_tokens: int | None = None if context.features.reasoning is None else 0

    def whole(self, final: RequestOutput) -> responses.Completion:
        """The answer at once."""
        fail_on_error(final)
        choices = []
        for out in final.outputs:
            delta = Cursor().advance(out, every_token=True)
            if delta is not None:
                reader = self._turn.reader()
                message = self._message(reader.push(delta.text, last=True))
                choices.append(responses.ChatChoice(message=message, **self._common(out, delta, reader)))
        usage = responses.usage_of([final])
        return responses.Completion(
            self.id,
            "chat.completion",
            self._created,
            self._model,
            choices,
            usage,
            responses.prompt_logprobs(final),
        )

    def _message(self, pieces: Sequence[Piece]) -> responses.Message:
        text, reasoning = texts(pieces)
        made = [
            responses.ToolCall(responses.CalledFunction(call.name, arguments), id=call.id, type="function")
            for call, arguments in calls(pieces)
        ]
        return responses.Message(
            "assistant",
            None if not text and made else text,
            reasoning if reasoning and self._shows_reasoning else UNSET,
            made or UNSET,
        )

    async def events(self, outputs: Outputs, usage: Literal["none", "last", "every"]) -> AsyncGenerator[bytes, None]:
        """The answer in pieces: the role of each choice, its text, its end."""
        kind = "chat.completion.chunk"
        told: responses.Usage | UnsetType | None = UNSET if usage == "none" else None
        following = [(Cursor(), self._turn.reader()) for _ in range(self.params.n)]
        choices = [_opening(index) for index in range(self.params.n)]
        async with aclosing(outputs):
            async for _, output in outputs:
                fail_on_error(output)
                choices += self._news(output, following)
                if usage == "every":
                    told = responses.usage_of([output], self._reasoning_tokens)
                for choice in choices:
                    yield event(self._completion(kind, [choice], told))
                choices = []
        if usage != "none":
            yield event(self._completion(kind, [], responses.usage_of([output], self._reasoning_tokens)))

    def _news(self, output: RequestOutput, following: list[tuple[Cursor, AnswerReader]]) -> list[responses.ChatChoice]:
        choices = []
        for out, (cursor, reader) in zip(output.outputs, following, strict=True):
            delta = cursor.advance(out, every_token=self._with_ids)
            if delta is None:
                continue
            pieces = reader.push(delta.text, last=out.finished)
            if self._reasoning_tokens is not None and reader.is_reasoning:
                self._reasoning_tokens += len(delta.token_ids)
            piece = self._piece(pieces)
            if piece != _NOTHING or delta.finish_reason or delta.logprobs is not None or self._with_ids:
                choices.append(responses.ChatChoice(delta=piece, **self._common(out, delta, reader)))
        return choices

    def _piece(self, pieces: Sequence[Piece]) -> responses.Message:
        text, reasoning = texts(pieces)
        return responses.Message(
            content=text or UNSET,
            reasoning_content=reasoning if reasoning and self._shows_reasoning else UNSET,
            tool_calls=_call_pieces(pieces) or UNSET,
        )

    def _common(self, out: CompletionOutput, delta: Delta, reader: AnswerReader) -> dict[str, Any]:
        logprobs = None if delta.logprobs is None else responses.chat_logprobs(delta, self.params.logprobs or 0)
        # As OpenAI has it: who names the function knows that it is called, and learns how the answer ended.
        called = delta.finish_reason == "stop" and reader.calls and not self._named
        return {
            "index": out.index,
            "logprobs": logprobs,
            "finish_reason": "tool_calls" if called else delta.finish_reason,
            "stop_reason": delta.stop_reason,
            "token_ids": delta.token_ids if self._with_ids else UNSET,
        }

    def _completion(
        self, kind: str, choices: list[responses.ChatChoice], usage: responses.Usage | UnsetType | None
    ) -> responses.Completion:
        return responses.Completion(self.id, kind, self._created, self._model, choices, usage)


_NOTHING = responses.Message()


def _opening(index: int) -> responses.ChatChoice:
    return responses.ChatChoice(index, None, None, None, delta=responses.Message("assistant", ""))


def _call_pieces(pieces: Sequence[Piece]) -> list[responses.ToolCall]:
    """What a stream says of calls: name and id where one begins, then its arguments."""
    found: dict[int, responses.ToolCall] = {}
    for piece in pieces:
        if isinstance(piece, Call):
            function = responses.CalledFunction(piece.name, "")
            found[piece.index] = responses.ToolCall(function, piece.index, piece.id, "function")
        elif isinstance(piece, Arguments):
            known = found.get(piece.index)
            if known is None:
                found[piece.index] = responses.ToolCall(responses.CalledFunction(arguments=piece.text), piece.index)
            else:
                function = responses.CalledFunction(known.function.name, piece.text)
                found[piece.index] = responses.ToolCall(function, known.index, known.id, known.type)
    return list(found.values())
