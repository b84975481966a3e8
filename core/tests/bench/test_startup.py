"""`bench startup`: when a start has reached its rate, what an empty cache is, and one start for real."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from vllm_core.bench import startup
from vllm_core.bench.start_child import full_speed, thinned
from vllm_core.bench.workloads import WORKLOADS
from vllm_core.errors import EngineError

STEADY = [(float(step), 10 * step) for step in range(101)]


def test_a_first_run_as_fast_as_a_later_one_is_at_its_rate_at_once() -> None:
    assert full_speed(STEADY, STEADY) == 0.0


def test_a_run_that_begins_slowly_reaches_its_rate_later() -> None:
    slow = [(2.0 * step, 10 * step) for step in range(51)]
    fast = [(100.0 + step, 500 + 10 * step) for step in range(1, 51)]
    assert full_speed([*slow, *fast], STEADY) == 100.0


def test_a_run_that_never_reaches_80_percent_says_so() -> None:
    assert full_speed([(1.3 * at, count) for at, count in STEADY], STEADY) is None
    assert full_speed([(1.2 * at, count) for at, count in STEADY], STEADY) == 0.0


def test_a_run_of_other_length_is_compared_by_its_rate() -> None:
    assert full_speed([(2 * at, 2 * count) for at, count in STEADY], STEADY) == 0.0


def test_a_curve_keeps_its_ends_and_few_points() -> None:
    found = thinned([(float(step), step) for step in range(5000)])
    assert (found[0], found[-1]) == ((0.0, 0), (4999.0, 4999))
    assert len(found) <= 201


def test_a_cold_start_finds_no_cache_but_models(tmp_path) -> None:
    environ = {"HOME": "/h", "XDG_CACHE_HOME": "/c", "TRITON_CACHE_DIR": "/t", "SOME_CACHE_PATH": "/n", "VLLM_CORE_CACHE": "/v"}
    found = startup.fresh({**environ, "HF_HUB_CACHE": "/hub", "PATH": "/bin"}, tmp_path / "home")
    assert found["HF_HOME"] == "/c/huggingface"
    assert found["HF_HUB_CACHE"] == "/hub"
    assert found["PATH"] == "/bin"
    assert not {"TRITON_CACHE_DIR", "SOME_CACHE_PATH"} & set(found)
    for name in ("HOME", "XDG_CACHE_HOME", "VLLM_CORE_CACHE", "TMPDIR"):
        assert Path(found[name]).is_relative_to(tmp_path)
    assert Path(found["TMPDIR"]).is_dir()


@pytest.fixture(scope="module")
def started(job):
    workload = replace(WORKLOADS["throughput"], requests=3, prompt=(8, 16), output=(8, 8))
    watched: list[str] = []
    result = startup.measure(job.model, job.options, workload, 1, lambda kind, one: watched.append(kind))
    return result, watched


def test_a_start_is_measured_in_processes_of_its_own(started) -> None:
    result, watched = started
    assert watched == ["cold", "cached"]
    found = result.startup
    for one in (found.cold, *found.cached):
        assert one.accepts_s == pytest.approx(sum(one.stages.values()), abs=0.05)
        assert one.accepts_s < one.first_token_s
        assert one.tokens[-1][1] == one.steady[-1][1] == 24
    assert set(found.light) == set(startup.LIGHT)
    assert found.modules["import vllm_core"] < found.modules["vllm-core --help"]
    assert result.kind == "startup"
    assert result.plan.platform == result.config["platform"]["platform"]


def test_a_start_that_fails_says_why(job) -> None:
    order = startup.Order(spawned=0, name="m", options={"model": "/no/such"}, workload=WORKLOADS["latency"], out="/dev/null")
    with pytest.raises(EngineError, match="Model does not exist: /no/such"):
        startup._start(order, {"PATH": "/usr/bin"})
