"""`bench serve`: arrivals, what a stream's times are, and the names in the result."""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from vllm_core.bench import serve

NAMES = {
    "date",
    "backend",
    "model_id",
    "tokenizer_id",
    "num_prompts",
    "request_rate",
    "burstiness",
    "max_concurrency",
    "duration",
    "completed",
    "failed",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "request_goodput",
    "output_throughput",
    "total_token_throughput",
    "max_concurrent_requests",
    *(f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p99") for name in ("ttft", "tpot", "itl", "e2el")),
}


def load(**options: Any) -> serve.Load:
    return serve.Load(base_url="http://nowhere", **options)


def answer(start: float, ttft: float, gaps: list[float], error: str = "") -> serve.Answer:
    return serve.Answer(10, start, ttft, ttft + sum(gaps), gaps, len(gaps) + 1, "x", error)


def test_the_result_has_the_names_of_vllms_and_right_figures(tmp_path: Path) -> None:
    answers = [answer(0, 0.1, [0.01] * 4), answer(0.05, 0.3, [0.02] * 4), answer(0, 0, [], "HTTP 500")]
    found = serve.result(load(num_prompts=3, goodput={"ttft": 200.0}), "m", answers, 2.0)
    assert set(found) >= NAMES
    assert (found["completed"], found["failed"]) == (2, 1)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (20, 10)
    assert found["output_throughput"] == 5.0
    assert found["mean_ttft_ms"] == pytest.approx(200)
    assert found["median_tpot_ms"] == pytest.approx(15)
    assert found["p99_itl_ms"] == pytest.approx(20)
    assert found["request_goodput"] == 0.5
    assert found["max_concurrent_requests"] == 2
    serve.save(found, tmp_path / "r.json", detailed=False)
    saved = json.loads((tmp_path / "r.json").read_text())
    assert set(saved) >= NAMES
    assert "generated_texts" not in saved
    serve.save(found, tmp_path / "r.json", detailed=True)
    assert len(json.loads((tmp_path / "r.json").read_text())["ttfts"]) == 3


def test_percentiles_lie_between_the_nearest_values() -> None:
    assert serve.percentile([1.0, 2.0, 3.0, 4.0], 50) == 2.5
    assert serve.percentile([1.0, 2.0], 100) == 2.0
    assert serve.percentile([], 99) == 0.0


def test_the_same_seed_sends_the_same_requests() -> None:
    assert serve.requests(load(seed=3, range_ratio=0.5)) == serve.requests(load(seed=3, range_ratio=0.5))
    assert serve.requests(load(seed=3)) != serve.requests(load(seed=4))
    some = serve.requests(load(prefix_len=7, input_len=20, output_len=10, range_ratio=0.5))
    assert len({tuple(prompt[:7]) for prompt, _ in some}) == 1
    assert all(17 <= len(prompt) <= 37 and 5 <= count <= 15 for prompt, count in some)
    assert max(token for prompt, _ in some for token in prompt) < 250


@pytest.mark.parametrize(("burstiness", "spread"), [(1.0, 1.0), (100.0, 0.1), (0.25, 2.0)])
def test_arrivals_have_the_rate_and_the_burstiness_that_were_asked_for(
    monkeypatch: pytest.MonkeyPatch, burstiness: float, spread: float
) -> None:
    now = [0.0]

    async def sleep(seconds: float) -> None:
        now[0] += seconds

    async def times() -> list[float]:
        return [now[0] async for _ in serve.arrivals(load(num_prompts=4000, request_rate=50.0, burstiness=burstiness))]

    monkeypatch.setattr(serve.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(serve.asyncio, "sleep", sleep)
    at = asyncio.run(times())
    gaps = [later - sooner for sooner, later in itertools.pairwise(at)]
    assert statistics.fmean(gaps) == pytest.approx(1 / 50, rel=0.1)
    assert statistics.pstdev(gaps) / statistics.fmean(gaps) == pytest.approx(spread, rel=0.15)


def test_a_server_that_is_not_there_is_an_error_with_a_fix() -> None:
    from vllm_core.errors import ConfigError

    with pytest.raises(ConfigError, match="--base-url"):
        asyncio.run(serve.run(serve.Load(base_url="http://127.0.0.1:9", num_prompts=1)))
