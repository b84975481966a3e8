"""``POST /tokenize`` and ``POST /detokenize``."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response
from msgspec import UNSET, Struct, UnsetType

from vllm_core.serve import schema
from vllm_core.serve.context import Context
from vllm_core.serve.conversation import Asked, open_turn
from vllm_core.serve.errors import json_response
from vllm_core.serve.messages import read_messages
from vllm_core.serve.tools.offered import read_tools

MAX_TOKENS = 1 << 20


class Tokens(Struct, frozen=True):
    """Ids of a prompt."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class Detokenized(Struct, frozen=True):
    """The text of ids."""

    prompt: str


def router(context: Context) -> APIRouter:
    """The endpoints."""
    api = APIRouter()

    @api.post("/tokenize", openapi_extra=schema.openapi(schema.TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        body = await context.read(request, schema.TokenizeRequest)
        tokenizer = context.tokenizer("prompt")
        text = await _text(context, body)
        special = body.messages is None if body.add_special_tokens is None else body.add_special_tokens
        ids = await asyncio.to_thread(tokenizer.encode, text, special, MAX_TOKENS)
        texts = [tokenizer.token_text(token) for token in ids] if body.return_token_strs else UNSET
        return json_response(Tokens(len(ids), context.engine.max_model_len, ids, texts))

    @api.post("/detokenize", openapi_extra=schema.openapi(schema.DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        body = await context.read(request, schema.DetokenizeRequest)
        tokenizer = context.tokenizer("tokens")
        for index, token in enumerate(body.tokens):
            if not 0 <= token < tokenizer.vocab_size:
                expected = f"ids below {tokenizer.vocab_size}"
                raise schema.refused(f"tokens[{index}]", str(token)[:32], expected, "send ids of this model's tokenizer")
        return json_response(Detokenized(await asyncio.to_thread(tokenizer.decode, body.tokens, False)))

    return api


async def _text(context: Context, body: schema.TokenizeRequest) -> str:
    if (body.prompt is None) == (body.messages is None):
        found = "neither" if body.prompt is None else "both"
        raise schema.refused("prompt", f"{found} of prompt and messages", "one of them", "send prompt or messages")
    if body.prompt is not None:
        return body.prompt
    going_on = bool(body.continue_final_message)
    tools = read_tools(body.tools, "required" if body.tools else None, None)
    asked = Asked(
        messages=read_messages(body.messages),
        tools=tools,
        add_generation_prompt=bool(body.add_generation_prompt) if going_on else body.add_generation_prompt is not False,
        continue_final_message=going_on,
        chat_template=body.chat_template,
        variables=body.chat_template_kwargs or {},
    )
    return (await open_turn(context, asked)).prompt
