"""Engines on the platform under test, driven request by request, with nothing to fall back on (`strict`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from vllm_conformance.case import Evidence, Subject
from vllm_conformance.cases.runs import models
from vllm_conformance.cases.runs.teacher import PRECISIONS, Marks
from vllm_conformance.subject import DENY, denied_by
from vllm_core import launch
from vllm_core.engine.messages import EngineRequest, RequestUpdate, TokenLogprobs
from vllm_core.sampling_params import PoolingParams, SamplingParams

LENGTHS = (1, 15, 16, 17, 40, 90)
OPTIONS: Mapping[str, Any] = {
    "max_model_len": 256,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 32 << 20,
    "skip_tokenizer_init": True,
    "strict": True,
}


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Tokens of a prompt; equal seeds have equal beginnings."""
    return [(7 * i * i + 13 * i + 3 + 31 * seed) % 250 for i in range(length)]


@dataclass(slots=True)
class Output:
    """What became of one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    vector: list[float] | None = None
    reason: str | None = None
    cached: int = 0


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine on a tiny model; `dtype` is that by which its results are judged."""

    name: str
    dtype: str
    engine: launch.Engine

    @property
    def plan(self) -> Any:
        """Its Plan."""
        return self.engine.blueprint.plan

    @property
    def core(self) -> Any:
        """Its `EngineCore`."""
        return self.engine.core

    def run(self, requests: Sequence[EngineRequest], at_step: Callable[[int], None] = lambda step: None) -> dict[str, Output]:
        """Run all requests to their end; ``at_step`` is called before each step with its number."""
        outputs = {request.request_id: Output() for request in requests}
        for request in requests:
            self.core.add(request)
        step = 0
        while self.core.has_work:
            at_step(step)
            for update in self.core.step():
                _take(outputs, update)
            step += 1
        return outputs

    def generate(self, prompts: Sequence[Sequence[int]], count: int = 24, **params: Any) -> list[Output]:
        """Greedily, unless ``params`` say otherwise; ``count`` tokens each."""
        salt = params.pop("salt", "")
        requests = [request_of(f"{n}", prompt, count, salt=salt, **params) for n, prompt in enumerate(prompts)]
        return list(self.run(requests).values())

    def left_over(self) -> str:
        """What the engine still holds after all requests have ended, or nothing."""
        stats = self.core.stats()
        held = {"running": stats.running, "waiting": stats.waiting, "kv_usage": stats.kv_usage}
        return ", ".join(f"{name} is {value}" for name, value in held.items() if value)

    def evidence(self, marks: Marks, *problems: str) -> Evidence:
        """FAIL with the first problem, or PASS with the number of near-ties; call sites by kind of provider."""
        found = [problem for problem in (marks.problem(self.dtype), *problems, self.left_over()) if problem]
        detail = found[0] if found else f"{marks.tokens} tokens, {marks.ties} near-ties"
        return Evidence(outcome="FAIL" if found else "PASS", detail=detail, calls=dict(self.core.stats().calls_by_kind))


def _take(outputs: dict[str, Output], update: RequestUpdate) -> None:
    output = outputs[update.request_id]
    output.tokens += update.token_ids
    output.logprobs += update.logprobs or []
    output.vector = update.pooled or output.vector
    output.reason = update.finish_reason or output.reason
    output.cached = max(output.cached, update.num_cached_tokens)


def request_of(name: str, prompt: Sequence[int], count: int = 24, *, salt: str = "", **params: Any) -> EngineRequest:
    """A request for exactly ``count`` tokens; nothing stops it before."""
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": count, **params})
    return EngineRequest(
        request_id=name,
        prompt_token_ids=list(prompt),
        arrival_time=0.0,
        params=sampling,
        seed=sampling.seed or 0,
        max_tokens=count,
        stop_token_ids=list(sampling.stop_token_ids or ()),
        bad_words=list(sampling.bad_words_token_ids or ()),
        salt=salt,
    )


def pooling_request(name: str, prompt: Sequence[int]) -> EngineRequest:
    """A request for the prompt's vector."""
    return EngineRequest(request_id=name, prompt_token_ids=list(prompt), arrival_time=0.0, pooling=PoolingParams())


def options_of(subject: Subject, name: str, dtype: str, **options: Any) -> dict[str, Any]:
    """Options of an engine on the device under test."""
    track = {"model_impl": "transformers"} if name in models.TRANSFORMERS else {}
    base = {**OPTIONS, "model": str(models.folder_of(name)), "dtype": dtype, **track}
    return {**base, "platform": subject.platform, "device_ids": [subject.facts.id], **options, **denied(subject, options)}


def denied(subject: Subject, options: Mapping[str, Any]) -> dict[str, Any]:
    """The option that names what the run denies, and what ``options`` deny beside it; nothing where neither does."""
    names = (*denied_by(subject.options), *options.get(DENY, ()))
    return {DENY: list(names)} if names else {}


@contextmanager
def engine(subject: Subject, name: str, dtype: str, **options: Any) -> Iterator[Engine]:
    """Plan, build and warm up; the device's memory is given back afterwards."""
    judged = max(dtype, options.get("kv_cache_dtype", dtype), key=PRECISIONS.index)
    with assembled(launch.blueprint(options_of(subject, name, dtype, **options)), name, judged) as made:
        yield made


@contextmanager
def assembled(design: launch.Blueprint, name: str, dtype: str) -> Iterator[Engine]:
    """Build an engine from a blueprint."""
    made = launch.assemble(design)
    try:
        yield Engine(name, dtype, made)
    finally:
        made.close()
