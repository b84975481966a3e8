"""Prometheus metrics with the names that users of vLLM know, in a registry of our own.

Ours alone are `vllm:platform_info`, `vllm:fallbacks`, `vllm:engine_restarts` and `vllm:requests_refused`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from vllm_core.engine.messages import EngineStats
from vllm_core.errors import DeadlineError, EngineError
from vllm_core.outputs import RequestOutput
from vllm_core.sampling_params import SamplingParams
from vllm_core.serve.admission import Admission
from vllm_core.serve.histogram import Histogram, Histograms

if TYPE_CHECKING:
    from vllm_core.serve.context import Engine

_GAUGES = {
    "running": ("vllm:num_requests_running", "requests that are being computed"),
    "waiting": ("vllm:num_requests_waiting", "requests that wait for their turn"),
    "kv_usage": ("vllm:kv_cache_usage_perc", "KV blocks in use; 1 is all of them"),
}
_COUNTERS = {
    "prefix_queries": ("vllm:prefix_cache_queries", "prompt tokens looked up in the prefix cache"),
    "prefix_hits": ("vllm:prefix_cache_hits", "prompt tokens found in the prefix cache"),
    "prompt_tokens": ("vllm:prompt_tokens", "prompt tokens computed or found"),
    "generation_tokens": ("vllm:generation_tokens", "tokens generated"),
    "preemptions": ("vllm:num_preemptions", "requests put back to make room"),
    "steps": ("vllm:engine_steps", "steps of the engine"),
}
_FALLBACKS = ("reference", "host")
"""Kinds of providers that stand in where no kernel is there; demotions are counted beside them."""
_LATENCY_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
_TOKEN_S = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80)
_COUNTS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
_NUMBERS = (1, 2, 5, 10, 20)


class Metrics:
    """What the server observes of its requests, and what the engine counts. Every sample has the label `model_name`."""

    def __init__(self, engine: Engine) -> None:
        self._registry = CollectorRegistry()
        model_name = engine.model_names[0]
        self._engine = _EngineCollector(engine)
        self._registry.register(self._engine)
        self._labels = {"model_name": model_name}
        self._histograms = Histograms(self._labels)
        self._registry.register(self._histograms)
        self._ttft = self._histogram("time_to_first_token_seconds", "from arrival to the first token", _TTFT_S)
        self._itl = self._histogram("inter_token_latency_seconds", "between two tokens of a sequence", _TOKEN_S)
        self._tpot = self._histogram(
            "request_time_per_output_token_seconds", "mean time of a sequence's tokens after its first", _TOKEN_S
        )
        self._e2e = self._histogram("e2e_request_latency_seconds", "from arrival to the last token", _LATENCY_S)
        self._stages = {
            stage: self._histogram(f"request_{stage}_time_seconds", f"time in {stage}", _LATENCY_S)
            for stage in ("queue", "inference", "prefill", "decode")
        }
        self._prompt = self._histogram("request_prompt_tokens", "tokens of a prompt", _COUNTS)
        self._generated = self._histogram("request_generation_tokens", "tokens generated for a sequence", _COUNTS)
        self._longest = self._histogram(
            "request_max_num_generation_tokens", "tokens generated for the longest sequence of a request", _COUNTS
        )
        self._n = self._histogram("request_params_n", "sequences asked for", _NUMBERS)
        self._max_tokens = self._histogram("request_params_max_tokens", "tokens asked for", _COUNTS)
        self._success = Counter(
            "vllm:request_success",
            "sequences by how they ended",
            ("model_name", "finished_reason"),
            registry=self._registry,
        )

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return self._histograms.make(f"vllm:{name}", text, buckets)

    async def follow(
        self, outputs: AsyncGenerator[RequestOutput, None], params: SamplingParams, arrived: float
    ) -> AsyncGenerator[RequestOutput, None]:
        """Pass on and observe the outputs of a request that arrived at ``arrived`` (`time.perf_counter`)."""
        request = _Followed(arrived, time.perf_counter() - arrived)
        self._n.observe(params.n)
        if params.max_tokens is not None:
            self._max_tokens.observe(params.max_tokens)
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    self._observe(request, output)
                    yield output
        except (GeneratorExit, asyncio.CancelledError, DeadlineError):
            self._ended("abort", params.n - len(request.ended))
            raise
        except EngineError:
            self._ended("error", params.n - len(request.ended))
            raise

    def _observe(self, request: _Followed, output: RequestOutput) -> None:
        now = time.perf_counter()
        for sequence in output.outputs:
            count = len(sequence.token_ids)
            before, at = request.tokens.get(sequence.index, (0, now))
            if count > before:
                request.tokens[sequence.index] = (count, now)
                if before:
                    self._itl.observe((now - at) / (count - before))
                else:
                    request.first[sequence.index] = now
                    if len(request.first) == 1:
                        self._ttft.observe(now - request.arrived)
            if sequence.finish_reason is not None and sequence.index not in request.ended:
                request.ended.add(sequence.index)
                self._ended(sequence.finish_reason)
                self._generated.observe(count)
                if count > 1:
                    self._tpot.observe((now - request.first[sequence.index]) / (count - 1))
        if output.finished:
            self._e2e.observe(now - request.arrived)
            self._prompt.observe(len(output.prompt_token_ids))
            self._longest.observe(max(len(one.token_ids) for one in output.outputs))
            self._observe_stages(request, output.metrics)

    def _observe_stages(self, request: _Followed, metrics: Mapping[str, float]) -> None:
        """The engine's times, and what the request waited in the server before."""
        if "queue_s" not in metrics:
            return
        times = {
            "queue": request.held_s + metrics["queue_s"],
            "inference": metrics["prefill_s"] + metrics["decode_s"],
            "prefill": metrics["prefill_s"],
            "decode": metrics["decode_s"],
        }
        for stage, seconds in times.items():
            self._stages[stage].observe(seconds)

    def embedded(self, seconds: float, prompt_tokens: int) -> None:
        """One embedding was made."""
        self._e2e.observe(seconds)
        self._prompt.observe(prompt_tokens)
        self._ended("stop")

    def _ended(self, reason: str, count: int = 1) -> None:
        self._success.labels(**self._labels, finished_reason=reason).inc(count)

    @property
    def stats(self) -> EngineStats | None:
        """What the engine said last; None while it is away."""
        return self._engine.stats

    def render(self, stats: EngineStats | None, admission: Admission, accept: str) -> tuple[bytes, str]:
        """The page and its content type. Without ``stats`` (the engine is away) its samples are left out."""
        self._engine.stats, self._engine.admission = stats, admission
        encoder, content_type = choose_encoder(accept)
        return encoder(self._registry), content_type


class _Followed:
    """What has been seen of one request: tokens and their time by sequence, and when each began."""

    __slots__ = ("arrived", "ended", "first", "held_s", "tokens")

    def __init__(self, arrived: float, held_s: float) -> None:
        self.arrived, self.held_s = arrived, held_s
        self.ended: set[int] = set()
        self.first: dict[int, float] = {}
        self.tokens: dict[int, tuple[int, float]] = {}


class _EngineCollector(Collector):
    """The engine's own numbers, as it gave them last."""

    def __init__(self, engine: Engine) -> None:
        self.stats: EngineStats | None = None
        self.admission: Admission | None = None
        self._served = engine
        self._model_name = engine.model_names[0]

    def collect(self) -> Iterator[Metric]:
        """Yield the families."""
        info = {**self._served.platform_info, "model_name": self._model_name}
        yield InfoMetricFamily("vllm:platform", "what the engine runs on", info)
        yield self._family(
            CounterMetricFamily, "vllm:engine_restarts", "times the engine started again", self._served.num_restarts
        )
        if self.admission is not None:
            refused = self.admission.refused
            yield self._family(CounterMetricFamily, "vllm:requests_refused", "requests turned away: too many waited", refused)
        if self.stats is None:
            return
        for cls, table in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for field, (name, text) in table.items():
                held = self.admission.waiting if field == "waiting" and self.admission is not None else 0
                yield self._family(cls, name, text, getattr(self.stats, field) + held)
        yield self._fallbacks(self.stats)

    def _fallbacks(self, stats: EngineStats) -> Metric:
        """Calls of ops that a reference or the host answered, and providers that were demoted."""
        text = "calls of ops by a reference or the host (by kind), and providers demoted"
        metric = CounterMetricFamily("vllm:fallbacks", text, labels=("model_name", "kind"))
        for kind in _FALLBACKS:
            metric.add_metric((self._model_name, kind), stats.calls_by_kind.get(kind, 0))
        metric.add_metric((self._model_name, "demotion"), self._served.num_demotions)
        return metric

    def _family(self, cls: type[GaugeMetricFamily] | type[CounterMetricFamily], name: str, text: str, value: float) -> Metric:
        metric = cls(name, text, labels=("model_name",))
        metric.add_metric((self._model_name,), value)
        return metric
