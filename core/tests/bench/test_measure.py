"""`bench throughput` on a small model: what its result holds; never how fast it was."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vllm_core import __version__
from vllm_core.bench import evidence, measure, surroundings
from vllm_core.bench.results import summarize
from vllm_core.bench.workloads import WORKLOADS
from vllm_core.errors import ConfigError


def test_there_is_a_row_for_each_workload_with_the_first_run_apart(result, job) -> None:
    assert [row.workload.name for row in result.rows] == [one.name for one in job.workloads]
    for row in result.rows:
        assert [run.seed for run in (row.first, *row.runs)] == [0, 1, 2]
        assert row.summary == summarize(row.runs)


def test_every_request_of_a_run_has_its_tokens_and_times(result) -> None:
    for row in result.rows:
        for run in (row.first, *row.runs):
            asked = row.workload.draw(run.seed)
            assert run.output_tokens == sum(count for _, count in asked)
            assert run.prompt_tokens == sum(len(prompt) for prompt, _ in asked)
            times = list(zip(run.queue_s, run.prefill_s, run.decode_s, strict=True))
            assert len(times) == len(asked)
            assert all(0 <= sum(one) <= run.seconds and min(one) >= 0 for one in times)


def test_token_ids_are_those_of_the_model(result) -> None:
    assert {row.workload.vocabulary for row in result.rows} == {256}


def test_the_result_says_what_ran_on_what(result, folder, platform) -> None:
    assert result.plan.platform == platform
    assert result.config["model"]["load_format"] == "dummy"
    assert result.model.name == str(folder)
    assert result.model.dummy
    assert result.model.weights.startswith("dummy: seed 0")
    assert result.environment.versions["vllm-core"] == __version__
    assert result.environment.cores >= 1
    assert {"device_s", "weights_s", "warmup_s"} <= set(result.timings)


def test_memory_is_by_pool_with_the_peak(result) -> None:
    assert result.memory.pools["kv"] > 0
    assert result.memory.peak_bytes >= sum(result.memory.pools.values())
    assert result.memory.beside_kv_bytes == result.memory.peak_bytes - result.memory.pools["kv"]
    assert result.memory.host_peak_bytes > result.memory.peak_bytes


def test_evidence_is_of_fixed_seeds_and_has_its_digest(result) -> None:
    found = result.evidence
    assert [one.seed for one in found.alone] == [one.seed for one in found.together] == list(range(evidence.SAMPLES))
    assert sum(one.temperature > 0 for one in found.alone) == evidence.SAMPLED
    assert found.digest == evidence.digest(found)
    for one in found.alone:
        assert len(one.prompt_logprobs) == len(one.prompt) - 1
        assert all(len(top) == evidence.TOP for top in one.top)
    assert found.longest.prompt_tokens + len(found.longest.tokens) == result.max_model_len


def test_a_tool_call_is_what_the_grammar_lets_through(result) -> None:
    pytest.importorskip("xgrammar")
    assert result.evidence.tool_call.text.startswith('{"name"')


@pytest.mark.parametrize("name", ["throughput", "prefix"])
def test_a_workload_that_the_context_does_not_hold_is_refused_before_it_runs(name, job) -> None:
    watched = []
    with pytest.raises(ConfigError, match="longer than the context"):
        measure.measure(replace(job, workloads=[WORKLOADS[name]]), watched.append)
    assert watched == []


def test_no_secret_is_written() -> None:
    environ = {"VLLM_CORE_API_KEY": "s3cret", "VLLM_PLATFORM": "cpu", "OMP_NUM_THREADS": "1", "HF_TOKEN": "s3cret", "HOME": "/"}
    assert surroundings.variables(environ) == {"OMP_NUM_THREADS": "1", "VLLM_PLATFORM": "cpu"}


def test_a_package_outside_of_a_checkout_has_no_git_state(tmp_path) -> None:
    (tmp_path / "module.py").write_text("", encoding="utf-8")
    assert surroundings.git_state(tmp_path / "module.py") is None
