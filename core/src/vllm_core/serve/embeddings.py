"""Endpoints of models whose vectors are asked for: ``POST /v1/embeddings``, ``/pooling``, ``/score`` and ``/rerank``."""

from __future__ import annotations

import base64
import struct
import time

from fastapi import APIRouter, Request, Response
from msgspec import Struct

from vllm_core.engine.postprocess import cosine
from vllm_core.outputs import EmbeddingRequestOutput
from vllm_core.sampling_params import PoolingParams
from vllm_core.serve import schema
from vllm_core.serve.context import Context, new_id
from vllm_core.serve.errors import json_response
from vllm_core.serve.responses import PoolingUsage, pooling_usage
from vllm_core.serve.stream import together, until_gone

Prompts = list[str | list[int]]


class Embedding(Struct, frozen=True):
    """One vector: numbers, or base64 of little-endian float32."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class Pooled(Struct, frozen=True):
    """One vector, as /pooling names it."""

    index: int
    data: list[float] | str
    object: str = "pooling"


class Score(Struct, frozen=True):
    """How alike one pair of texts is: the cosine of their vectors."""

    index: int
    score: float
    object: str = "score"


class Document(Struct, frozen=True):
    """A text that was ranked."""

    text: str


class Ranked(Struct, frozen=True):
    """One document and how relevant it is to the query; `index` is its place in the request."""

    index: int
    document: Document
    relevance_score: float


class Answer(Struct, frozen=True):
    """Vectors or scores, one for each input."""

    id: str
    created: int
    model: str
    data: list[Embedding] | list[Pooled] | list[Score]
    usage: PoolingUsage
    object: str = "list"


class Ranking(Struct, frozen=True):
    """Documents, the most relevant first."""

    id: str
    model: str
    usage: PoolingUsage
    results: list[Ranked]


def router(context: Context) -> APIRouter:
    """The endpoints."""
    api = APIRouter()
    _add_vectors(api, context)
    _add_scores(api, context)
    return api


def _add_vectors(api: APIRouter, context: Context) -> None:
    @api.post("/v1/embeddings", openapi_extra=schema.openapi(schema.EmbeddingRequest))
    async def embeddings(request: Request) -> Response:
        body = await context.read(request, schema.EmbeddingRequest, "pooling")
        request_id = new_id("embd")
        outputs = await _embed(context, request, schema.prompts(body.input, "input"), body.dimensions, request_id)
        data = [Embedding(index, _form(body, output)) for index, output in enumerate(outputs)]
        return json_response(_answer(context, body, request_id, data, outputs))

    @api.post("/pooling", openapi_extra=schema.openapi(schema.PoolingRequest))
    async def pooling(request: Request) -> Response:
        body = await context.read(request, schema.PoolingRequest, "pooling")
        request_id = new_id("pool")
        outputs = await _embed(context, request, schema.prompts(body.input, "input"), body.dimensions, request_id)
        data = [Pooled(index, _form(body, output)) for index, output in enumerate(outputs)]
        return json_response(_answer(context, body, request_id, data, outputs))


def _add_scores(api: APIRouter, context: Context) -> None:
    @api.post("/score", openapi_extra=schema.openapi(schema.ScoreRequest))
    @api.post("/v1/score", openapi_extra=schema.openapi(schema.ScoreRequest))
    async def score(request: Request) -> Response:
        body = await context.read(request, schema.ScoreRequest, "pooling")
        left, right = _texts(body.text_1, "text_1"), _texts(body.text_2, "text_2")
        if len(left) not in (1, len(right)):
            raise schema.refused("text_1", f"{len(left)} texts", f"one text, or {len(right)} as in text_2", "send as many")
        request_id = new_id("score")
        outputs = await _embed(context, request, [*left, *right], None, request_id)
        first, second = outputs[: len(left)], outputs[len(left) :]
        data = [
            Score(index, cosine(first[index if len(first) > 1 else 0].outputs.embedding, other.outputs.embedding))
            for index, other in enumerate(second)
        ]
        return json_response(_answer(context, body, request_id, data, outputs))

    @api.post("/rerank", openapi_extra=schema.openapi(schema.RerankRequest))
    @api.post("/v1/rerank", openapi_extra=schema.openapi(schema.RerankRequest))
    @api.post("/v2/rerank", openapi_extra=schema.openapi(schema.RerankRequest))
    async def rerank(request: Request) -> Response:
        body = await context.read(request, schema.RerankRequest, "pooling")
        documents = _texts(body.documents, "documents")
        request_id = new_id("rerank")
        outputs = await _embed(context, request, [body.query, *documents], None, request_id)
        query = outputs[0].outputs.embedding
        ranked = [
            Ranked(index, Document(text), cosine(query, output.outputs.embedding))
            for index, (text, output) in enumerate(zip(documents, outputs[1:], strict=True))
        ]
        ranked.sort(key=lambda one: -one.relevance_score)
        usage = pooling_usage(outputs)
        return json_response(Ranking(request_id, context.model_name(body), usage, ranked[: body.top_n or None]))


async def _embed(
    context: Context, request: Request, prompts: Prompts, dimensions: int | None, request_id: str
) -> list[EmbeddingRequestOutput]:
    params = PoolingParams(dimensions=dimensions)
    asked = [context.embed(prompt, params, f"{request_id}-{index}") for index, prompt in enumerate(prompts)]
    return await until_gone(request.receive, together(asked))


def _answer(
    context: Context,
    body: schema.Body,
    request_id: str,
    data: list[Embedding] | list[Pooled] | list[Score],
    outputs: list[EmbeddingRequestOutput],
) -> Answer:
    return Answer(request_id, int(time.time()), context.model_name(body), data, pooling_usage(outputs))


def _texts(value: object, name: str) -> list[str]:
    """Text or texts, also as objects with ``text``. Raises RequestError."""
    items = value if isinstance(value, list) else [value]
    if not items or len(items) > schema.MAX_SEQUENCES:
        raise schema.refused(name, f"{len(items)} texts", f"1 to {schema.MAX_SEQUENCES}", "send several requests")
    texts: list[str] = []
    for index, one in enumerate(items):
        text = one["text"] if isinstance(one, dict) and set(one) == {"text"} else one
        if not isinstance(text, str):
            raise schema.refused(f"{name}[{index}]", schema.short(text), "a text", "send texts alone")
        texts.append(text)
    return texts


def _form(body: schema.EmbeddingRequest, output: EmbeddingRequestOutput) -> list[float] | str:
    vector = output.outputs.embedding
    if body.encoding_format != "base64":
        return vector
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode("ascii")
