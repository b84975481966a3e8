"""What all endpoints share: the engine, the metrics, reading a request."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast

from starlette.requests import Request

from vllm_core.chat import default_sampling
from vllm_core.engine.messages import EngineStats
from vllm_core.errors import EngineError
from vllm_core.outputs import EmbeddingRequestOutput, RequestOutput
from vllm_core.sampling_params import PoolingParams, SamplingParams
from vllm_core.serve import schema
from vllm_core.serve.body import read_json
from vllm_core.serve.errors import HTTPRequestError
from vllm_core.serve.metrics import Metrics
from vllm_core.serve.stream import Outputs, merge

if TYPE_CHECKING:
    from vllm_core.loader.tokenizer import Tokenizer


class Engine(Protocol):
    """The part of `AsyncLLM` that the server uses."""

    tokenizer: Tokenizer | None
    max_model_len: int
    error: Exception | None

    @property
    def config(self) -> Any: ...
    @property
    def runner(self) -> str: ...
    @property
    def generation_config(self) -> Mapping[str, Any]: ...
    @property
    def model_names(self) -> list[str]: ...
    @property
    def platform_info(self) -> dict[str, str]: ...
    @property
    def is_alive(self) -> bool: ...

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str = "",
        add_special_tokens: bool = True,
    ) -> AsyncIterator[RequestOutput]: ...

    async def embed(self, prompt: str | Sequence[int], params: PoolingParams, request_id: str) -> EmbeddingRequestOutput: ...

    async def stats(self) -> EngineStats: ...


@dataclass(frozen=True, slots=True)
class Context:
    """One server. Sizes in bytes, times in seconds since the epoch."""

    engine: Engine
    metrics: Metrics
    max_body_bytes: int
    created: int = field(default_factory=lambda: int(time.time()))

    async def read(self, request: Request, kind: type[schema.Schema], runner: str) -> schema.Schema:
        """Read and check a request for an engine of that ``runner``. Raises RequestError, ClientGoneError."""
        body = schema.parse(kind, await read_json(request, self.max_body_bytes))
        if body.model is not None:
            self.check_model(body.model)
        if self.engine.runner != runner:
            fix = "POST /v1/embeddings" if runner == "generate" else "POST /v1/completions or /v1/chat/completions"
            raise HTTPRequestError(
                "Model is used for something else",
                on="model",
                found=f"an engine with runner {self.engine.runner!r}",
                expected=f"runner {runner!r}",
                fix=f"{fix}, or start the server with --runner {runner}",
            )
        return body

    def check_model(self, name: str) -> None:
        """Raises HTTPRequestError for a name that is not served."""
        names = self.engine.model_names
        if name not in names:
            raise HTTPRequestError(
                "Model does not exist",
                on="model",
                found=schema.short(name),
                expected=f"one of: {', '.join(names)}",
                fix="GET /v1/models lists what is served",
                status=404,
                code="model_not_found",
            )

    def model_name(self, body: schema.Body) -> str:
        """The name to answer under."""
        return body.model or self.engine.model_names[0]

    def defaults(self) -> SamplingParams:
        """What the model's generation config asks for."""
        return default_sampling(self.engine.generation_config)

    def start(
        self,
        body: schema.Generation,
        prompts: Sequence[str | list[int]],
        params: SamplingParams,
        request_id: str,
        special: bool,
    ) -> Outputs:
        """Outputs of all prompts, merged. Raises RequestError."""
        if len(prompts) * params.n > schema.MAX_SEQUENCES:
            found = f"{len(prompts)} prompts with n={params.n}"
            raise schema.refused("n", found, f"at most {schema.MAX_SEQUENCES} sequences", "send several requests")
        if body.priority and self.engine.config.scheduler.scheduling_policy != "priority":
            found = f"{body.priority} with --scheduling-policy fcfs"
            raise schema.refused(
                "priority", found, "a server that orders by priority", "leave it out, or change the server's policy"
            )
        outputs = [
            self.engine.generate(
                prompt,
                params,
                f"{request_id}-{index}",
                priority=body.priority or 0,
                cache_salt=body.cache_salt or "",
                add_special_tokens=special,
            )
            for index, prompt in enumerate(prompts)
        ]
        return merge([self.metrics.follow(cast("AsyncGenerator[RequestOutput, None]", source), params.n) for source in outputs])


def fail_on_error(output: RequestOutput | EmbeddingRequestOutput) -> None:
    """Raise EngineError where the engine gave a request up."""
    if output.error is not None:
        raise EngineError(
            "Request failed",
            on=output.request_id,
            found=output.error,
            expected="a finished request",
            fix="send it again; the server's log has the cause",
        )


def new_id(prefix: str) -> str:
    """An id that no other request has."""
    return f"{prefix}-{uuid.uuid4().hex}"
