"""`vllm-core bench latency | throughput | compare` as a person runs them, on a model of a few kilobytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm_core.bench.host import write_null_model
from vllm_core.bench.results import read
from vllm_core.cli.bench_engine import BATCHES
from vllm_core.cli.main import main

SMALL = ["--num-prompts", "2", "--input-len", "4:8", "--output-len", "4", "--shared-len", "0", "--runs", "1"]
ENGINE = ["--load-format", "dummy", "--kv-cache-memory-bytes", "4000000", "--max-num-seqs", "4", "--max-model-len", "128"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_null_model(tmp_path_factory.mktemp("null"))


@pytest.fixture(scope="module")
def written(model, platform, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("out") / "a.json"
    argv = ["--model", str(model), "--platform", platform, "--workloads", "throughput,prefill", *SMALL, *ENGINE]
    assert main(["bench", "throughput", *argv, "--out", str(out), "--out", str(out.with_suffix(".md"))]) == 0
    return out


def test_throughput_writes_every_form_that_was_asked_for(written) -> None:
    result = read(written)
    assert [row.workload.name for row in result.rows] == ["throughput", "prefill"]
    assert (result.rows[0].workload.requests, result.rows[0].workload.prompt) == (2, (4, 8))
    assert "| throughput | 2 x 4 to 8 in, 4 out |" in written.with_suffix(".md").read_text(encoding="utf-8")


def test_latency_passes_engine_options_through(model, platform, tmp_path, capsys) -> None:
    out = tmp_path / "l.json"
    argv = ["--model", str(model), "--platform", platform, *SMALL, *ENGINE, "--enforce-eager", "--seed", "7"]
    assert main(["bench", "latency", *argv, "--out", str(out)]) == 0
    result = read(out)
    assert result.kind == "latency"
    assert result.config["platform"]["enforce_eager"] is True
    assert result.model.weights.startswith("dummy: seed 7")
    assert "prefill" in capsys.readouterr().out


def test_compare_passes_a_run_against_itself(written, tmp_path, capsys) -> None:
    out = tmp_path / "c.json"
    assert main(["bench", "compare", str(written), str(written), "--out", str(out)]) == 0
    assert "PASSED" in capsys.readouterr().out
    assert json.loads(out.read_text(encoding="utf-8"))["passed"] is True


def test_compare_of_a_slower_run_exits_with_1_and_names_what_decides(written, tmp_path, capsys) -> None:
    body = json.loads(written.read_text(encoding="utf-8"))
    for row in body["rows"]:
        for run in row["runs"]:
            run["seconds"] *= 2
    (tmp_path / "b.json").write_text(json.dumps(body), encoding="utf-8")
    assert main(["bench", "compare", str(written), str(tmp_path / "b.json")]) == 1
    shown = capsys.readouterr().out
    assert "fail, decides" in shown
    assert "throughput of throughput decides: x 0.500" in shown


def test_compare_of_unlike_runs_exits_with_2(written, tmp_path, capsys) -> None:
    body = json.loads(written.read_text(encoding="utf-8"))
    del body["rows"][1]
    (tmp_path / "b.json").write_text(json.dumps(body), encoding="utf-8")
    assert main(["bench", "compare", str(written), str(tmp_path / "b.json")]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: Unlike cannot be compared with like: workloads")
    assert all(f"\n  {part}:" in shown for part in ("found", "expected", "fix"))


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["latency"], "--model"),
        (["latency", "--model", "demo", "--runs", "0"], "1 to 100"),
        (["latency", "--model", "demo", "--input-len", "9:8"], "LOW:HIGH"),
        (["latency", "--model", "demo", "--input-len", "0"], "LOW:HIGH"),
        (["latency", "--model", "demo", "--shared-len", "-1"], "at least 0"),
        (["throughput", "--model", "demo", "--num-prompts", "0"], "at least 1"),
        (["throughput", "--model", "demo", "--workloads", "nothing"], "throughput, latency"),
        (["throughput", "--model", "demo", "--workloads", "prefix,prefix"], "each once"),
        (["throughput", "--model", "demo", "--out", "a.txt"], "no form"),
        (["throughput", "--model", "demo", "--max-num-seq", "3"], "did you mean '--max-num-seqs'?"),
        (["throughput", "--model", "qwen3-8b", "--load-format", "gguf"], "Shape has no weights"),
        (["startup", "--model", "qwen3-8b", "--load-format", "gguf"], "Shape has no weights"),
        (["startup", "--model", "demo", "--out", "none/a.json"], "no such folder"),
        (["compare", "a.json"], "B"),
        (["compare", "no.json", "no.json"], "cannot be read"),
    ],
)
def test_wrong_command_lines_are_errors_of_four_parts(argv, expected, capsys) -> None:
    assert main(["bench", *argv]) == 2
    shown = capsys.readouterr().err
    assert expected in shown
    assert all(f"\n  {part}:" in shown for part in ("found", "expected", "fix"))


def test_throughput_runs_all_batches_unless_told_otherwise() -> None:
    assert BATCHES == ("throughput", "decode64", "prefill", "prefix")
