"""Prometheus metrics with the names that users of vLLM know, in a registry of our own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from vllm_core.engine.messages import EngineStats
from vllm_core.errors import EngineError
from vllm_core.outputs import RequestOutput

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
}
_LATENCY_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
_TOKEN_S = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80)


class Metrics:
    """What the server observes of its requests, and what the engine counts. Every sample has the label `model_name`."""

    def __init__(self, model_name: str, platform_info: Mapping[str, str]) -> None:
        self._registry = CollectorRegistry()
        self._engine = _EngineCollector(model_name, platform_info)
        self._registry.register(self._engine)
        self._labels = {"model_name": model_name}
        self._ttft = self._histogram("time_to_first_token_seconds", "from arrival to the first token", _TTFT_S)
        self._itl = self._histogram("inter_token_latency_seconds", "between two tokens of a sequence", _TOKEN_S)
        self._e2e = self._histogram("e2e_request_latency_seconds", "from arrival to the last token", _LATENCY_S)
        self._stages = {
            stage: self._histogram(f"request_{stage}_time_seconds", f"time in {stage}", _LATENCY_S)
            for stage in ("queue", "prefill", "decode")
        }
        self._success = Counter(
            "vllm:request_success",
            "sequences by how they ended",
            ("model_name", "finished_reason"),
            registry=self._registry,
        )

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(f"vllm:{name}", text, ("model_name",), buckets=buckets, registry=self._registry)
        return family.labels(**self._labels)

    async def follow(self, outputs: AsyncGenerator[RequestOutput, None], n: int) -> AsyncGenerator[RequestOutput, None]:
        """Pass on and observe the outputs of a request of ``n`` sequences, which arrives at the first ``anext``."""
        request = _Followed(time.perf_counter())
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    self._observe(request, output)
                    yield output
        except (GeneratorExit, asyncio.CancelledError):
            self._ended("abort", n - len(request.ended))
            raise
        except EngineError:
            self._ended("error", n - len(request.ended))
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
                elif not request.started:
                    request.started = True
                    self._ttft.observe(now - request.arrived)
            if sequence.finish_reason is not None and sequence.index not in request.ended:
                request.ended.add(sequence.index)
                self._ended(sequence.finish_reason)
        if output.finished:
            self._e2e.observe(now - request.arrived)
            for stage, histogram in self._stages.items():
                if f"{stage}_s" in output.metrics:
                    histogram.observe(output.metrics[f"{stage}_s"])

    def embedded(self, seconds: float) -> None:
        """One embedding was made."""
        self._e2e.observe(seconds)
        self._ended("stop")

    def _ended(self, reason: str, count: int = 1) -> None:
        self._success.labels(**self._labels, finished_reason=reason).inc(count)

    def render(self, stats: EngineStats | None, accept: str) -> tuple[bytes, str]:
        """The page and its content type. Without ``stats`` (the engine is away) its samples are left out."""
        self._engine.stats = stats
        encoder, content_type = choose_encoder(accept)
        return encoder(self._registry), content_type


class _Followed:
    """What has been seen of one request: tokens and their time by sequence."""

    __slots__ = ("arrived", "ended", "started", "tokens")

    def __init__(self, arrived: float) -> None:
        self.arrived = arrived
        self.started = False
        self.ended: set[int] = set()
        self.tokens: dict[int, tuple[int, float]] = {}


class _EngineCollector(Collector):
    """The engine's own numbers, as it gave them last."""

    def __init__(self, model_name: str, platform_info: Mapping[str, str]) -> None:
        self.stats: EngineStats | None = None
        self._model_name = model_name
        self._info = InfoMetricFamily("vllm:platform", "what the engine runs on", {**platform_info, "model_name": model_name})

    def collect(self) -> Iterator[Metric]:
        """Yield the families."""
        yield self._info
        if self.stats is None:
            return
        for family, table in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for field, (name, text) in table.items():
                metric = family(name, text, labels=("model_name",))
                metric.add_metric((self._model_name,), getattr(self.stats, field))
                yield metric
