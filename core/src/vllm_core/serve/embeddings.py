"""``POST /v1/embeddings``."""

from __future__ import annotations

import asyncio
import base64
import struct
import time

from fastapi import APIRouter, Request, Response
from msgspec import Struct

from vllm_core.outputs import EmbeddingRequestOutput
from vllm_core.sampling_params import PoolingParams
from vllm_core.serve import schema
from vllm_core.serve.context import Context, fail_on_error, new_id
from vllm_core.serve.errors import json_response
from vllm_core.serve.stream import until_gone


class Embedding(Struct, frozen=True):
    """One vector: numbers, or base64 of little-endian float32."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingUsage(Struct, frozen=True):
    """Tokens of one request."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(Struct, frozen=True):
    """The answer."""

    id: str
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage
    object: str = "list"


def router(context: Context) -> APIRouter:
    """The endpoint."""
    api = APIRouter()

    @api.post("/v1/embeddings", openapi_extra=schema.openapi(schema.EmbeddingRequest))
    async def embeddings(request: Request) -> Response:
        body = await context.read(request, schema.EmbeddingRequest, "pooling")
        prompts, params = schema.prompts(body.input, "input"), PoolingParams(dimensions=body.dimensions)
        request_id = new_id("embd")
        outputs = await until_gone(request.receive, _embed_all(context, prompts, params, request_id))
        count = sum(len(output.prompt_token_ids) for output in outputs)
        form = _base64 if body.encoding_format == "base64" else list
        data = [Embedding(index, form(output.outputs.embedding)) for index, output in enumerate(outputs)]
        return json_response(Embeddings(request_id, context.model_name(body), data, EmbeddingUsage(count, count)))

    return api


async def _embed_all(
    context: Context, prompts: list[str | list[int]], params: PoolingParams, request_id: str
) -> list[EmbeddingRequestOutput]:
    """All vectors; the first error ends the others."""
    tasks = [
        asyncio.ensure_future(_embed(context, prompt, params, f"{request_id}-{index}")) for index, prompt in enumerate(prompts)
    ]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _embed(context: Context, prompt: str | list[int], params: PoolingParams, request_id: str) -> EmbeddingRequestOutput:
    started = time.perf_counter()
    output = await context.engine.embed(prompt, params, request_id)
    fail_on_error(output)
    context.metrics.embedded(time.perf_counter() - started)
    return output


def _base64(vector: list[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode("ascii")
