"""OpenTelemetry traces, where ``--otlp-traces-endpoint`` asks for them: a span for each HTTP request, one for each generation.

Attributes follow the semantic conventions for generative AI; contents of requests are never among them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vllm_core.errors import ConfigError
from vllm_core.version import __version__

if TYPE_CHECKING:
    from starlette.datastructures import Headers

    from vllm_core.outputs import RequestOutput
    from vllm_core.sampling_params import SamplingParams
    from vllm_core.serve.caller import Caller


class Tracing:
    """Traces nothing."""

    @contextmanager
    def request(self, method: str, path: str, headers: Headers, request_id: str, status: Callable[[], int]) -> Iterator[Any]:
        """Surround one HTTP request; yields what its children refer to."""
        yield None

    def generation(self, caller: Caller, params: SamplingParams, output: RequestOutput, model: str, started: float) -> None:
        """Record a generation that has ended; ``started`` is in seconds since the epoch."""

    def shutdown(self) -> None:
        """Send what was not sent yet."""


class OpenTelemetryTracing(Tracing):
    """Sends spans to an OTLP endpoint. Raises ConfigError where the extra `otel` is not installed."""

    def __init__(self, endpoint: str, exporter: Any = None) -> None:
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise _not_installed(error) from error
        resource = Resource.create({"service.name": "vllm-core", "service.version": __version__})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter or _exporter(endpoint)))
        self._tracer = self._provider.get_tracer("vllm_core.serve", __version__)
        self._read = TraceContextTextMapPropagator().extract

    @contextmanager
    def request(self, method: str, path: str, headers: Headers, request_id: str, status: Callable[[], int]) -> Iterator[Any]:
        """A span of kind server, child of the caller's ``traceparent``."""
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context

        carrier = {name: value for name, value in headers.items() if name in ("traceparent", "tracestate")}
        attributes = {"http.request.method": method, "url.path": path, "vllm.request_id": request_id}
        span = self._tracer.start_span(
            f"{method} {path}", context=self._read(carrier), kind=SpanKind.SERVER, attributes=attributes
        )
        try:
            yield set_span_in_context(span)
        finally:
            span.set_attribute("http.response.status_code", status())
            if status() >= 500:
                span.set_status(StatusCode.ERROR)
            span.end()

    def generation(self, caller: Caller, params: SamplingParams, output: RequestOutput, model: str, started: float) -> None:
        """A span with the numbers of one generation."""
        reasons = [str(one.finish_reason) for one in output.outputs]
        attributes: dict[str, Any] = {
            "gen_ai.request.id": output.request_id,
            "gen_ai.request.model": model,
            "gen_ai.request.n": params.n,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.usage.input_tokens": len(output.prompt_token_ids),
            "gen_ai.usage.output_tokens": sum(len(one.token_ids) for one in output.outputs),
            "gen_ai.response.finish_reasons": reasons,
        }
        if params.max_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = params.max_tokens
        for stage in ("queue", "prefill", "decode"):
            if f"{stage}_s" in output.metrics:
                attributes[f"gen_ai.latency.time_in_model_{stage}"] = output.metrics[f"{stage}_s"]
        span = self._tracer.start_span(
            "llm_request", context=caller.trace, start_time=int(started * 1e9), attributes=attributes
        )
        span.end(int(time.time() * 1e9))

    def shutdown(self) -> None:
        """Send what was not sent yet."""
        self._provider.shutdown()


def make_tracing(endpoint: str | None) -> Tracing:
    """What `--otlp-traces-endpoint` asks for. Raises ConfigError where it cannot be had."""
    return Tracing() if endpoint is None else OpenTelemetryTracing(endpoint)


def _exporter(endpoint: str) -> Any:
    """Over HTTP for an address that ends in ``/v1/traces``, which is OTLP's path there; else over gRPC, OTLP's default."""
    try:
        if endpoint.rstrip("/").endswith("/v1/traces"):
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HTTPExporter

            return HTTPExporter(endpoint=endpoint)
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https://"))
    except ImportError as error:
        raise _not_installed(error) from error


def _not_installed(error: ImportError) -> ConfigError:
    return ConfigError(
        "Traces cannot be sent",
        on="--otlp-traces-endpoint",
        found=str(error),
        expected="the extra `otel`",
        fix="install vllm-core[otel] as you installed vllm-core",
    )
