"""What all endpoints share: the engine, the metrics, reading a request."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from starlette.requests import Request

from vllm_core.chat import default_sampling
from vllm_core.engine.messages import EngineStats
from vllm_core.engine.structured.constraint import DEAD_END
from vllm_core.errors import EngineError
from vllm_core.outputs import ClassificationRequestOutput, EmbeddingRequestOutput, RequestOutput
from vllm_core.sampling_params import PoolingParams, SamplingParams
from vllm_core.serve import schema
from vllm_core.serve.admission import Admission
from vllm_core.serve.body import read_json
from vllm_core.serve.caller import CALLER, Caller
from vllm_core.serve.errors import HTTPRequestError
from vllm_core.serve.features import Features
from vllm_core.serve.metrics import Metrics
from vllm_core.serve.settings import AppOptions
from vllm_core.serve.stream import Outputs, merge
from vllm_core.serve.tracing import Tracing

if TYPE_CHECKING:
    from vllm_core.loader.tokenizer import Tokenizer
    from vllm_core.models.labels import Labels

Pooled = TypeVar("Pooled", EmbeddingRequestOutput, ClassificationRequestOutput)

log = logging.getLogger("vllm_core.serve")


class Engine(Protocol):
    """The part of `AsyncLLM` that the server uses."""

    @property
    def tokenizer(self) -> Tokenizer | None: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def error(self) -> Exception | None: ...
    @property
    def config(self) -> Any: ...
    @property
    def runner(self) -> str: ...
    @property
    def labels(self) -> Labels | None: ...
    @property
    def generation_config(self) -> Mapping[str, Any]: ...
    @property
    def model_names(self) -> list[str]: ...
    @property
    def platform_info(self) -> dict[str, str]: ...
    @property
    def plan_json(self) -> bytes: ...
    @property
    def num_restarts(self) -> int: ...
    @property
    def num_demotions(self) -> int: ...
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
        deadline: float | None = None,
    ) -> AsyncIterator[RequestOutput]: ...

    async def embed(
        self, prompt: str | Sequence[int], params: PoolingParams, request_id: str, *, deadline: float | None = None
    ) -> EmbeddingRequestOutput: ...

    async def classify(
        self, prompt: str | Sequence[int], request_id: str, *, deadline: float | None = None
    ) -> ClassificationRequestOutput: ...

    async def stats(self) -> EngineStats: ...
    async def reset_prefix_cache(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Context:
    """One server. Sizes in bytes, times in seconds since the epoch."""

    engine: Engine
    metrics: Metrics
    options: AppOptions
    admission: Admission
    tracing: Tracing
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def features(self) -> Features:
        """Parsers, templates and structured output, as the operator set them."""
        return self.options.features

    async def read(self, request: Request, kind: type[schema.Schema], runner: str | None = None) -> schema.Schema:
        """Read and check a request for an engine of that ``runner``, or any. Raises RequestError, ClientGoneError."""
        body = schema.parse(kind, await read_json(request, self.options.max_body_bytes))
        if body.model is not None:
            self.check_model(body.model)
        if runner is not None and self.engine.runner != runner:
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

    def tokenizer(self, name: str) -> Tokenizer:
        """The tokenizer. Raises RequestError about the field ``name`` where there is none."""
        found = self.engine.tokenizer
        if found is None:
            raise schema.refused(name, "an engine without a tokenizer", "a tokenizer", "start the server with --tokenizer")
        return found

    def chat_defaults(self) -> SamplingParams:
        """The same for chats, whose answers may take what the context has left unless the model's config limits them."""
        defaults = self.defaults()
        return defaults if "max_new_tokens" in self.engine.generation_config else defaults.replace(max_tokens=None)

    def start(
        self,
        body: schema.Scheduled,
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
        caller, arrived = CALLER.get(), time.perf_counter()
        self._log(request_id, prompts, params)
        sources = [
            self.metrics.follow(
                cast(
                    "AsyncGenerator[RequestOutput, None]",
                    self.engine.generate(
                        prompt,
                        params,
                        f"{request_id}-{index}",
                        priority=body.priority or 0,
                        cache_salt=body.cache_salt or "",
                        add_special_tokens=special,
                        **_until(caller),
                    ),
                ),
                params,
                arrived,
            )
            for index, prompt in enumerate(prompts)
        ]
        return self._admitted(merge(sources), caller, params, len(prompts) * params.n, body.priority or 0)

    async def embed(self, prompt: str | Sequence[int], params: PoolingParams, request_id: str) -> EmbeddingRequestOutput:
        """The vector of a prompt, admitted and counted like any request. Raises VLLMCoreError."""
        self._log(request_id, [prompt], params)
        return await self._pooled(lambda more: self.engine.embed(prompt, params, request_id, **more))

    async def classify(self, prompt: str | Sequence[int], request_id: str) -> ClassificationRequestOutput:
        """The classes of a prompt. Raises as `embed`."""
        self._log(request_id, [prompt], "classes")
        return await self._pooled(lambda more: self.engine.classify(prompt, request_id, **more))

    async def _pooled(self, ask: Callable[[dict[str, float]], Awaitable[Pooled]]) -> Pooled:
        caller, arrived = CALLER.get(), time.perf_counter()
        async with self.admission.enter(caller.tenant, 1, deadline=caller.deadline):
            output = await ask(_until(caller))
            self.admission.charge(caller.tenant, prompt_tokens=len(output.prompt_token_ids))
        fail_on_error(output)
        self.metrics.embedded(time.perf_counter() - arrived, len(output.prompt_token_ids))
        return output

    async def _admitted(self, outputs: Outputs, caller: Caller, params: SamplingParams, count: int, priority: int) -> Outputs:
        """Pass outputs on once the server lets the request in, and charge what they bring to its key."""
        started, charged = time.time(), _Charged()
        place = self.admission.enter(caller.tenant, count, priority=priority, deadline=caller.deadline)
        async with aclosing(outputs), place:
            async for index, output in outputs:
                prompt_tokens, output_tokens = charged.news(index, output)
                self.admission.charge(caller.tenant, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
                if output.finished:
                    self.tracing.generation(caller, params, output, self.engine.model_names[0], started)
                yield index, output

    def _log(self, request_id: str, prompts: Sequence[str | Sequence[int]], params: object) -> None:
        """What was asked, for those who ask for it."""
        if self.options.log_requests:
            limit = self.options.max_log_len
            shown = [prompt if limit is None else prompt[:limit] for prompt in prompts]
            log.info("request %s: prompts %r, %r", request_id, shown, params)


class _Charged:
    """What of each prompt has been charged: the tokens of its sequences so far."""

    __slots__ = ("_seen",)

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}

    def news(self, index: int, output: RequestOutput) -> tuple[int, int]:
        """Tokens of the prompt, at its first output, and new ones of its sequences."""
        before = self._seen.get(index)
        now = self._seen[index] = sum(len(one.token_ids) for one in output.outputs)
        return (len(output.prompt_token_ids), now) if before is None else (0, now - before)


def _until(caller: Caller) -> dict[str, float]:
    return {} if caller.deadline is None else {"deadline": caller.deadline}


def fail_on_error(output: RequestOutput | EmbeddingRequestOutput | ClassificationRequestOutput) -> None:
    """Raise EngineError where the engine gave a request up, RequestError where its grammar led nowhere."""
    if output.error is not None and output.error.startswith(DEAD_END):
        raise schema.refused("structured_outputs", output.error, "a grammar that can always go on or end", "change the grammar")
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
