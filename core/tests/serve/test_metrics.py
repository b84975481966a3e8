"""/metrics: names, labels and counts, as a Prometheus server reads them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from vllm_core.errors import RequestError
from vllm_core.serve import operations

pytestmark = pytest.mark.anyio

EXPECTED = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:num_preemptions_total",
    "vllm:request_success_total",
    "vllm:time_to_first_token_seconds_count",
    "vllm:inter_token_latency_seconds_count",
    "vllm:e2e_request_latency_seconds_count",
    "vllm:request_queue_time_seconds_sum",
    "vllm:request_prefill_time_seconds_sum",
    "vllm:request_decode_time_seconds_sum",
    "vllm:request_max_num_generation_tokens_sum",
    "vllm:platform_info",
}


async def samples(client: Any) -> dict[str, Any]:
    answer = await client.get("/metrics")
    assert answer.status_code == 200
    found = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            assert sample.labels.get("model_name") == "fake"
            found[(sample.name, sample.labels.get("finished_reason"))] = sample
    return {name if reason is None else f"{name}/{reason}": sample for (name, reason), sample in found.items()}


async def test_all_names_are_there_after_one_request(client: Any) -> None:
    await client.post("/v1/completions", {"prompt": "a"})
    names = {name.partition("/")[0] for name in await samples(client)}
    assert names >= EXPECTED


async def test_what_this_server_cannot_do_has_no_metric(client: Any) -> None:
    """One that stays at 0 would say that it was not used. docs/operating.md names them."""
    await client.post("/v1/completions", {"prompt": "a"})
    assert not [name for name in await samples(client) if "spec_decode" in name or "lora" in name]


async def test_engine_numbers_are_the_engines(client: Any) -> None:
    found = await samples(client)
    assert found["vllm:num_requests_running"].value == 2
    assert found["vllm:num_requests_waiting"].value == 3
    assert found["vllm:kv_cache_usage_perc"].value == 0.25
    assert found["vllm:prefix_cache_hits_total"].value == 4
    assert found["vllm:platform_info"].labels == {"platform": "fake", "dtype": "float32", "model_name": "fake"}


async def test_a_request_is_counted_once_in_each_histogram(client: Any) -> None:
    await client.post("/v1/completions", {"prompt": "a", "n": 2})
    found = await samples(client)
    assert found["vllm:time_to_first_token_seconds_count"].value == 1
    assert found["vllm:e2e_request_latency_seconds_count"].value == 1
    assert found["vllm:inter_token_latency_seconds_count"].value == 4, "two gaps in each of two sequences"
    assert found["vllm:request_success_total/stop"].value == 2
    assert found["vllm:request_queue_time_seconds_sum"].value >= 0.5, "the engine's queue, and the server's before it"
    assert found["vllm:request_decode_time_seconds_sum"].value == 2.0


async def test_how_requests_ended_is_told_apart(client: Any, engine: Any, leaver: Any, engine_dead: Any) -> None:
    engine.errors = {
        "dead": engine_dead,
        "wrong": RequestError("Prompt is empty", on="prompt", found="none", expected="one", fix="send one"),
    }
    for prompt in ("fine", "dead", "wrong"):
        await client.post("/v1/completions", {"prompt": prompt})
    engine.gate, leave = asyncio.Event(), asyncio.Event()
    asyncio.get_running_loop().call_later(0.05, leave.set)
    await leaver(client.app, "/v1/completions", {"prompt": "left", "n": 3}, leave)
    found = {name: sample.value for name, sample in (await samples(client)).items() if "request_success_total" in name}
    assert found == {
        "vllm:request_success_total/stop": 1,
        "vllm:request_success_total/error": 1,
        "vllm:request_success_total/abort": 3,
    }


async def test_embeddings_are_counted(pooling_engine: Any, make_client: Any) -> None:
    client = make_client(pooling_engine)
    await client.post("/v1/embeddings", {"input": ["a", "b"]})
    found = await samples(client)
    assert found["vllm:request_success_total/stop"].value == 2
    assert found["vllm:e2e_request_latency_seconds_count"].value == 2


async def test_metrics_are_served_while_the_engine_is_away(client: Any, engine: Any) -> None:
    await client.post("/v1/completions", {"prompt": "a"})
    engine.is_alive = False
    found = await samples(client)
    assert found["vllm:request_success_total/stop"].value == 1
    assert "vllm:num_requests_running" not in found


async def test_two_servers_in_one_process_do_not_share_numbers(engine: Any, make_client: Any) -> None:
    one, two = make_client(engine), make_client(engine)
    await one.post("/v1/completions", {"prompt": "a"})
    assert "vllm:request_success_total/stop" not in await samples(two)


async def test_openmetrics_for_those_who_ask(client: Any) -> None:
    answer = await client.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")


async def test_metrics_do_not_wait_for_a_long_step(client: Any, engine: Any, monkeypatch: Any) -> None:
    """The engine answers between two steps; Prometheus gives up after ten seconds."""
    assert (await samples(client))["vllm:num_requests_running"].value == 2
    monkeypatch.setattr(operations, "STATS_WAIT_S", 0.01)

    async def busy() -> Any:
        await asyncio.Event().wait()

    engine.stats = busy
    assert (await samples(client))["vllm:num_requests_running"].value == 2, "what it said last"
