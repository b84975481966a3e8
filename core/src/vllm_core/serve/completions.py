"""``POST /v1/completions``."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Literal

from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType

from vllm_core.outputs import RequestOutput
from vllm_core.serve import responses, schema
from vllm_core.serve.context import Context, fail_on_error, new_id
from vllm_core.serve.errors import json_response
from vllm_core.serve.stream import Cursor, Delta, EventStream, Outputs, collect, event, opened, until_gone
from vllm_core.serve.structure import read_structure


def router(context: Context) -> APIRouter:
    """The endpoint."""
    api = APIRouter()

    @api.post("/v1/completions", openapi_extra=schema.openapi(schema.CompletionRequest))
    async def completions(request: Request) -> Response:
        body = await context.read(request, schema.CompletionRequest, "generate")
        answer = _Answer(context, body)
        usage = body.streamed_usage
        outputs = context.start(body, answer.prompts, answer.params, answer.id, special=True)
        if body.stream:
            return EventStream(answer.events(await opened(request.receive, outputs), usage))
        finals = await until_gone(request.receive, collect(outputs, len(answer.prompts)))
        return json_response(answer.whole(finals))

    return api


class _Answer:
    """One request's answer, whole or in pieces."""

    def __init__(self, context: Context, body: schema.CompletionRequest) -> None:
        self.prompts = schema.prompts(body.prompt, "prompt")
        echoed = body.logprobs if body.echo and body.logprobs is not None else body.prompt_logprobs
        structure = read_structure(body.response_format, body.structured_outputs)
        # Who rates texts asks for the prompt and no token; the engine makes one with it, which is not shown.
        self._prompt_alone = bool(body.echo) and body.max_tokens == 0
        self.params = body.sampling(
            context.defaults(),
            logprobs=body.logprobs,
            prompt_logprobs=echoed,
            structured_outputs=structure,
            **({"max_tokens": 1} if self._prompt_alone else {}),
        )
        self._shows_prompt_logprobs = body.prompt_logprobs is not None
        self.id = new_id("cmpl")
        self._created = int(time.time())
        self._model = context.model_name(body)
        self._tokenizer = context.engine.tokenizer
        self._with_ids, self._echo = bool(body.return_token_ids), bool(body.echo)

    def whole(self, finals: list[RequestOutput]) -> responses.Completion:
        """The answer at once."""
        choices = []
        for index, output in enumerate(finals):
            choices += self._choices(index, output, [Cursor() for _ in output.outputs])
        return self._completion(choices, self._usage(finals))

    async def events(self, outputs: Outputs, usage: Literal["none", "last", "every"]) -> AsyncGenerator[bytes, None]:
        """The answer in pieces."""
        told: responses.Usage | UnsetType | None = UNSET if usage == "none" else None
        cursors = [[Cursor() for _ in range(self.params.n)] for _ in self.prompts]
        last: dict[int, RequestOutput] = {}
        async with aclosing(outputs):
            async for index, output in outputs:
                last[index] = output
                if usage == "every":
                    told = self._usage(list(last.values()))
                for choice in self._choices(index, output, cursors[index]):
                    yield event(self._completion([choice], told))
        if usage != "none":
            yield event(self._completion([], self._usage(list(last.values()))))

    def _usage(self, outputs: list[RequestOutput]) -> responses.Usage:
        """Without the token that is not shown where the prompt alone was asked for."""
        return responses.usage_of(outputs, shown=not self._prompt_alone)

    def _completion(self, choices: list[responses.Choice], usage: responses.Usage | UnsetType | None) -> responses.Completion:
        return responses.Completion(self.id, "text_completion", self._created, self._model, choices, usage)

    def _choices(self, index: int, output: RequestOutput, cursors: list[Cursor]) -> list[responses.Choice]:
        """What is new of each sequence of the ``index``-th prompt."""
        fail_on_error(output)
        choices = []
        for out, cursor in zip(output.outputs, cursors, strict=True):
            begins = self._echo and cursor.tokens == 0
            prefix = self._prompt_text(output) if begins else ""
            delta = cursor.advance(out, every_token=self._with_ids)
            if delta is not None and self._prompt_alone:
                delta = Delta("", [], None if delta.logprobs is None else [], "length", None)
            if delta is not None:
                choices.append(
                    responses.Choice(
                        index=index * self.params.n + out.index,
                        text=prefix + delta.text,
                        logprobs=self._logprobs(delta, cursor, output if begins else None),
                        finish_reason=delta.finish_reason,
                        stop_reason=delta.stop_reason,
                        token_ids=delta.token_ids if self._with_ids else UNSET,
                        prompt_logprobs=responses.prompt_logprobs(output) if self._shows_prompt_logprobs else UNSET,
                    )
                )
        return choices

    def _logprobs(self, delta: Delta, cursor: Cursor, echoed: RequestOutput | None) -> responses.CompletionLogprobs | None:
        """Of the delta's tokens, behind those of the prompt where that is ``echoed`` too."""
        if delta.logprobs is None:
            return None
        top = self.params.logprobs or 0
        before = None
        if echoed is not None and echoed.prompt_logprobs is not None:
            ids = echoed.prompt_token_ids
            first = "" if self._tokenizer is None else self._tokenizer.token_text(ids[0])
            before = responses.completion_logprobs(ids, echoed.prompt_logprobs, cursor, top, first)
        own = responses.completion_logprobs(delta.token_ids, delta.logprobs, cursor, top)
        return own if before is None else responses.joined(before, own)

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None:
            return output.prompt
        if self._tokenizer is None:
            raise schema.refused("echo", "token ids and no tokenizer", "a prompt given as text", "leave echo out")
        return self._tokenizer.decode(output.prompt_token_ids)
