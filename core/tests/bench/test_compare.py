"""The gate: which criteria hold, which one decides, and what cannot be compared."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from msgspec.structs import replace as changed

from vllm_core.bench import compare, results
from vllm_core.bench.results import Result
from vllm_core.errors import ConfigError

STAGES = ("queue_s", "prefill_s", "decode_s")


def scaled(result: Result, **factors: float) -> Result:
    """Runs with times multiplied: `seconds`, or a stage."""
    rows = []
    for row in result.rows:
        runs = []
        for run in row.runs:
            stages = {name: [value * factors.get(name, 1.0) for value in getattr(run, name)] for name in STAGES}
            runs.append(changed(run, seconds=run.seconds * factors.get("seconds", 1.0), **stages))
        rows.append(changed(row, runs=runs))
    return changed(result, rows=rows)


@pytest.fixture(scope="module")
def slow(result) -> Result:
    """Requests that take a second in each stage, so that what a clock adds is nothing."""
    rows = []
    for row in result.rows:
        runs = [changed(run, **{name: [1.0] * len(run.queue_s) for name in STAGES}) for run in row.runs]
        rows.append(changed(row, runs=runs))
    return changed(result, rows=rows)


def test_a_run_holds_against_itself(result) -> None:
    found = compare.compare(result, result)
    assert found.failed == ()
    assert found.differences == ()
    assert found.deciding.slack == min(one.slack for one in found.criteria if one.slack is not None)


@pytest.mark.parametrize(("factor", "holds"), [(1.04, True), (1.06, False), (0.5, True)])
def test_throughput_may_lose_a_twentieth(slow, factor, holds) -> None:
    found = compare.compare(slow, scaled(slow, seconds=factor))
    assert (not found.failed) == holds
    if not holds:
        assert {one.name for one in found.failed} == {"throughput"}
        assert found.deciding.name == "throughput"
        assert found.deciding.slack == pytest.approx(1 / factor / 0.95 - 1)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("factor", "holds"), [(1.09, True), (1.11, False)])
def test_each_stage_may_grow_by_a_tenth(slow, stage, factor, holds) -> None:
    found = compare.compare(slow, scaled(slow, **{stage: factor}))
    assert {one.name for one in found.failed} == (set() if holds else {f"p99 of {stage.removesuffix('_s')}"})


def test_what_a_clock_adds_to_a_short_stage_does_not_fail(slow) -> None:
    short = scaled(slow, prefill_s=0.0002)
    assert compare.compare(short, scaled(short, prefill_s=3)).failed == ()
    assert compare.compare(short, scaled(short, prefill_s=5)).failed != ()


def test_memory_may_grow_by_a_tenth(result) -> None:
    memory = result.memory
    larger = changed(
        memory, peak_bytes=int(memory.peak_bytes * 1.2), pools={**memory.pools, "kv": int(memory.pools["kv"] * 1.2)}
    )
    found = compare.compare(result, changed(result, memory=larger))
    assert "peak memory" in {one.name for one in found.failed}


def test_a_kv_cache_that_shrinks_does_not_hide_what_the_rest_has_grown_by(result) -> None:
    hidden = changed(result.memory, pools={**result.memory.pools, "kv": result.memory.pools["kv"] // 2})
    found = compare.compare(result, changed(result, memory=hidden))
    assert {one.name for one in found.failed} == {"peak beside the KV cache"}


def test_wrong_tokens_fail_however_fast(result) -> None:
    first, *rest = result.evidence.together
    wrong = changed(first, logprobs=[1.0] * len(first.logprobs))
    edited = changed(result, evidence=changed(result.evidence, together=[wrong, *rest]))
    for pair in ((result, edited), (edited, result)):
        found = compare.compare(*pair)
        assert {one.name for one in found.failed} == {"greedy takes the likeliest"}
        assert found.deciding.name == "greedy takes the likeliest"


@pytest.mark.parametrize("what", ["kind", "model", "device", "workloads"])
def test_unlike_is_not_compared(result, what) -> None:
    row = result.rows[0]
    other = {
        "kind": changed(result, kind="latency"),
        "model": changed(result, model=changed(result.model, weights="dummy: seed 1, bound None")),
        "device": changed(result, plan=replace(result.plan, device=replace(result.plan.device, name="another"))),
        "workloads": changed(result, rows=[changed(row, workload=replace(row.workload, requests=4)), *result.rows[1:]]),
    }[what]
    with pytest.raises(ConfigError, match="Unlike") as caught:
        compare.compare(result, other)
    assert caught.value.on == what


def test_a_file_without_what_is_judged_is_refused(result) -> None:
    for broken in (changed(result, evidence=None), changed(result, memory=None)):
        with pytest.raises(ConfigError, match="not whole: B"):
            compare.compare(result, broken)


BROKEN = {
    "no time": ("rows", 0, "runs", 0, "seconds", 0.0),
    "a time below 0": ("rows", 0, "runs", 0, "decode_s", 0, -1.0),
    "no requests' times": ("rows", 0, "runs", 0, "queue_s", []),
    "no runs": ("rows", 0, "runs", []),
    "a workload that is none": ("rows", 0, "workload", "prompt", [9, 2]),
    "a workload without end": ("rows", 0, "workload", "requests", 10**12),
    "tokens cut off": ("evidence", "together", 0, "tokens", []),
    "no distribution": ("evidence", "alone", 0, "top", 0, []),
    "no longest context": ("evidence", "longest", "tokens", []),
    "no log-probability": ("evidence", "longest", "logprobs", []),
    "nesting": ("config", "model", "hf_overrides", json.loads("[" * 400 + "]" * 400)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_fails_or_is_refused_but_breaks_nothing(result, name, tmp_path) -> None:
    body = json.loads(results.to_json(result))
    *path, last, value = BROKEN[name]
    place = body
    for step in path:
        place = place[step]
    place[last] = value
    (tmp_path / "b.json").write_text(json.dumps(body), encoding="utf-8")
    for swap in (False, True):
        try:
            broken = results.read(tmp_path / "b.json")
            found = compare.compare(broken, broken) if swap else compare.compare(result, broken)
        except ConfigError:
            continue
        assert found.failed or name == "nesting"


def test_starts_are_not_judged(result) -> None:
    start = changed(result, kind="startup", rows=[])
    with pytest.raises(ConfigError, match="nothing to judge"):
        compare.compare(start, start)


def test_what_differs_beside_the_figures_is_listed(result) -> None:
    first, *rest = result.plan.bindings
    plan = replace(result.plan, track="transformers", bindings=(replace(first, provider="other"), *rest))
    config = {**result.config, "platform": {**result.config["platform"], "enforce_eager": True}}
    versions = {**result.environment.versions, "torch": "0"}
    environment = changed(result.environment, versions=versions)
    found = compare.compare(result, changed(result, plan=plan, config=config, environment=environment)).differences
    assert [one[0] for one in found] == ["plan.track", f"provider of {first.op} ({first.role})", "--enforce-eager", "torch"]
    assert found[2] == ("--enforce-eager", "False", "True")
