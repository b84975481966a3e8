"""Whatever follows, or breaks, the OpenAPI document is never answered with a 5xx (schemathesis)."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode

from vllm_core.serve.features import make_features

POOLING = ("embeddings", "pooling", "score", "rerank", "classify")
CALM = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]


def operations(engine: Any, make_client: Any) -> list[Any]:
    features = make_features(
        tool_call_parser="hermes", enable_auto_tool_choice=True, reasoning_parser_name="qwen3", trust_request_chat_template=True
    )
    app = make_client(engine, features=features).app
    found = schemathesis.openapi.from_asgi("/openapi.json", app).get_all_operations()
    return [one.ok() for one in found]


def fuzz(engine: Any, make_client: Any, examples: int) -> None:
    statuses: set[int] = set()
    pools = engine.runner == "pooling"
    for operation in operations(engine, make_client):
        if (operation.path.rpartition("/")[2] in POOLING) != pools:
            continue  # it belongs to the other engine, and is refused by this one before its body matters
        # Without a body there is nothing to break.
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE) if operation.body else (GenerationMode.POSITIVE,):
            strategy = operation.as_strategy(generation_mode=mode)

            @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=CALM, derandomize=True)
            @given(case=strategy)
            def send(case: Any) -> None:
                response = case.call()
                statuses.add(response.status_code)
                assert response.status_code < 500, (case.path, case.body, response.text)
                if response.status_code >= 400 and response.headers.get("content-type") == "application/json":
                    assert response.json()["error"]["message"]

            send()
    assert {200, 400} <= statuses


def test_every_endpoint_describes_its_body(engine: Any, make_client: Any) -> None:
    posts = {one.path: one.body for one in operations(engine, make_client) if one.method.upper() == "POST"}
    bodies = [path for path, body in posts.items() if body]
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/tokenize"):
        assert path in bodies


@pytest.mark.parametrize("runner", ["generate", "pooling"])
def test_no_request_that_fits_or_breaks_the_document_fails_the_server(
    runner: str, engine: Any, pooling_engine: Any, make_client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    fuzz(engine if runner == "generate" else pooling_engine, make_client, 3)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("runner", ["generate", "pooling"])
def test_the_same_for_longer(
    runner: str, engine: Any, pooling_engine: Any, make_client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    fuzz(engine if runner == "generate" else pooling_engine, make_client, 200)
