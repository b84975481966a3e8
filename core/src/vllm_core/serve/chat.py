"""``POST /v1/chat/completions``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType

from vllm_core.chat import render
from vllm_core.outputs import CompletionOutput, RequestOutput
from vllm_core.sampling_params import SamplingParams
from vllm_core.serve import responses, schema
from vllm_core.serve.context import Context, fail_on_error, new_id
from vllm_core.serve.errors import json_response
from vllm_core.serve.messages import read_messages
from vllm_core.serve.stream import Cursor, Delta, EventStream, Outputs, collect, event, opened, until_gone

_OWN_ARGUMENTS = frozenset(
    ("self", "tokenizer", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message")
)


def router(context: Context) -> APIRouter:
    """The endpoint."""
    api = APIRouter()

    @api.post("/v1/chat/completions", openapi_extra=schema.openapi(schema.ChatRequest))
    async def chat_completions(request: Request) -> Response:
        body = await context.read(request, schema.ChatRequest, "generate")
        answer = _Answer(context, body)
        include_usage = body.include_usage
        prompt = await asyncio.to_thread(_prompt, context, body)
        outputs = context.start(body, [prompt], answer.params, answer.id, special=False)
        if body.stream:
            return EventStream(answer.events(await opened(request.receive, outputs), include_usage))
        finals = await until_gone(request.receive, collect(outputs, 1))
        return json_response(answer.whole(finals[0]))

    return api


def _prompt(context: Context, body: schema.ChatRequest) -> str:
    extra = body.chat_template_kwargs or {}
    if not _OWN_ARGUMENTS.isdisjoint(extra):
        name = min(_OWN_ARGUMENTS & set(extra))
        raise schema.refused(f"chat_template_kwargs.{name}", name, "arguments of the template", f"leave {name} out")
    going_on = bool(body.continue_final_message)
    if going_on and body.add_generation_prompt:
        raise schema.refused(
            "continue_final_message", "add_generation_prompt too", "one of them", "leave add_generation_prompt out"
        )
    options = {**extra, "add_generation_prompt": body.add_generation_prompt is not False and not going_on}
    return render(context.engine.tokenizer, read_messages(body.messages), continue_final_message=going_on, **options)


def _params(context: Context, body: schema.ChatRequest) -> SamplingParams:
    """Without a limit, the answer may take what the context has left."""
    defaults = context.defaults()
    if "max_new_tokens" not in context.engine.generation_config:
        defaults = defaults.replace(max_tokens=None)
    if body.top_logprobs is not None and not body.logprobs:
        raise schema.refused("top_logprobs", "top_logprobs without logprobs", "logprobs: true", "send logprobs: true")
    return body.sampling(defaults, max_tokens=body.limit, logprobs=(body.top_logprobs or 0) if body.logprobs else None)


class _Answer:
    """One request's answer, whole or in pieces."""

    def __init__(self, context: Context, body: schema.ChatRequest) -> None:
        self.params = _params(context, body)
        self.id = new_id("chatcmpl")
        self._created = int(time.time())
        self._model = context.model_name(body)
        self._with_ids = bool(body.return_token_ids)

    def whole(self, final: RequestOutput) -> responses.Completion:
        """The answer at once."""
        fail_on_error(final)
        choices = []
        for out in final.outputs:
            delta = Cursor().advance(out, every_token=True)
            if delta is not None:
                message = responses.Message("assistant", delta.text)
                choices.append(responses.ChatChoice(message=message, **self._common(out, delta)))
        return self._completion("chat.completion", choices, responses.usage_of([final]))

    async def events(self, outputs: Outputs, include_usage: bool) -> AsyncGenerator[bytes, None]:
        """The answer in pieces: the role of each choice, its text, its end."""
        kind, usage = "chat.completion.chunk", None if include_usage else UNSET
        for index in range(self.params.n):
            yield event(self._completion(kind, [_opening(index)], usage))
        cursors = [Cursor() for _ in range(self.params.n)]
        async with aclosing(outputs):
            async for _, output in outputs:
                fail_on_error(output)
                for choice in self._news(output, cursors):
                    yield event(self._completion(kind, [choice], usage))
        if include_usage:
            yield event(self._completion(kind, [], responses.usage_of([output])))

    def _news(self, output: RequestOutput, cursors: list[Cursor]) -> list[responses.ChatChoice]:
        choices = []
        for out, cursor in zip(output.outputs, cursors, strict=True):
            delta = cursor.advance(out, every_token=self._with_ids)
            if delta is not None:
                piece = responses.Message(content=delta.text) if delta.text else responses.Message()
                choices.append(responses.ChatChoice(delta=piece, **self._common(out, delta)))
        return choices

    def _common(self, out: CompletionOutput, delta: Delta) -> dict[str, Any]:
        logprobs = None if delta.logprobs is None else responses.chat_logprobs(delta, self.params.logprobs or 0)
        return {
            "index": out.index,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
            "token_ids": delta.token_ids if self._with_ids else UNSET,
        }

    def _completion(
        self, kind: str, choices: list[responses.ChatChoice], usage: responses.Usage | UnsetType | None
    ) -> responses.Completion:
        return responses.Completion(self.id, kind, self._created, self._model, choices, usage)


def _opening(index: int) -> responses.ChatChoice:
    return responses.ChatChoice(index, None, None, None, delta=responses.Message("assistant", ""))
