"""Traces: a span for each HTTP request under its caller's, one for each generation under that, no contents."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_core.errors import ConfigError
from vllm_core.serve.tracing import OpenTelemetryTracing, make_tracing

pytestmark = pytest.mark.anyio

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def test_requests_and_generations_are_spans_of_the_callers_trace(engine: Any, make_client: Any) -> None:
    exporters = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    exporter = exporters.InMemorySpanExporter()
    tracing = OpenTelemetryTracing("nowhere", exporter)
    client = make_client(engine, tracing=tracing)
    await client.post("/v1/completions", {"prompt": "secret"}, traceparent=PARENT, **{"x-request-id": "r-1"})
    tracing._provider.force_flush()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    tracing.shutdown()
    request, generation = spans["POST /v1/completions"], spans["llm_request"]
    assert f"{request.context.trace_id:032x}" == PARENT.split("-")[1]
    assert f"{request.parent.span_id:016x}" == PARENT.split("-")[2]
    assert generation.parent.span_id == request.context.span_id
    assert request.attributes["http.response.status_code"] == 200
    assert request.attributes["vllm.request_id"] == "r-1"
    assert generation.attributes["gen_ai.usage.output_tokens"] == 3
    assert generation.attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert "secret" not in repr([dict(span.attributes) for span in spans.values()])


def test_without_the_extra_the_option_is_an_error(monkeypatch: Any) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(ConfigError, match="otel"):
        make_tracing("http://localhost:4318/v1/traces")
