"""``POST /classify``, of models that tell classes of texts apart."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request, Response
from msgspec import Struct

from vllm_core.models.labels import Labels, check_use
from vllm_core.outputs import ClassificationRequestOutput
from vllm_core.serve import schema
from vllm_core.serve.context import Context, new_id
from vllm_core.serve.errors import json_response
from vllm_core.serve.responses import PoolingUsage, pooling_usage
from vllm_core.serve.stream import together, until_gone


class Classified(Struct, frozen=True):
    """One text: the likeliest class by name, and the probability of each in the model's order."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class Classes(Struct, frozen=True):
    """One entry for each input."""

    id: str
    created: int
    model: str
    data: list[Classified]
    usage: PoolingUsage
    object: str = "list"


def router(context: Context) -> APIRouter:
    """The endpoint."""
    api = APIRouter()

    @api.post("/classify", openapi_extra=schema.openapi(schema.ClassifyRequest))
    async def classify(request: Request) -> Response:
        body = await context.read(request, schema.ClassifyRequest, "pooling")
        labels = context.engine.labels
        check_use(labels, wants_classes=True)
        assert labels is not None, "it has been checked"
        request_id = new_id("classify")
        prompts = schema.prompts(body.input, "input")
        asked = [context.classify(prompt, f"{request_id}-{index}") for index, prompt in enumerate(prompts)]
        outputs = await until_gone(request.receive, together(asked))
        data = [_classified(index, output, labels) for index, output in enumerate(outputs)]
        return json_response(Classes(request_id, int(time.time()), context.model_name(body), data, pooling_usage(outputs)))

    return api


def _classified(index: int, output: ClassificationRequestOutput, labels: Labels) -> Classified:
    probs = output.outputs.probs
    best = max(range(len(probs)), key=probs.__getitem__)
    return Classified(index, labels.names[best], probs, len(probs))
