"""The result file: read back as it was written, or refused with the reason; its summary is that of the raw figures."""

from __future__ import annotations

import json

import pytest

from vllm_core.bench import results
from vllm_core.bench.results import Run, percentile, stage_percentile, summarize
from vllm_core.errors import ConfigError


def a_run(seconds: float, decode_s: list[float]) -> Run:
    same = [0.0] * len(decode_s)
    return Run(seed=0, seconds=seconds, prompt_tokens=10, output_tokens=20, queue_s=same, prefill_s=same, decode_s=decode_s)


def test_a_file_reads_back_as_the_same_result(result, tmp_path) -> None:
    results.write(result, tmp_path / "r.json")
    assert results.read(tmp_path / "r.json") == result


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "Expecting value"),
        ("[1]", "no result file"),
        ("{}", "no result file"),
        ('{"schema": 999}', "schema 999"),
        ('{"schema": 1, "kind": "latency"}', "missing required field"),
        ("[" * 100_000, ""),
    ],
)
def test_what_is_no_result_file_is_refused(text, found, tmp_path) -> None:
    (tmp_path / "r.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        results.read(tmp_path / "r.json")
    assert found in caught.value.found


def test_a_missing_file_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        results.read(tmp_path / "r.json")


def test_a_file_over_the_limit_is_not_read(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(results, "MAX_FILE_BYTES", 10)
    (tmp_path / "r.json").write_text(" " * 11, encoding="utf-8")
    with pytest.raises(ConfigError, match="11 bytes"):
        results.read(tmp_path / "r.json")


def test_a_wrong_value_in_a_file_is_refused_with_its_place(result, tmp_path) -> None:
    body = json.loads(results.to_json(result))
    body["rows"][0]["first"]["seconds"] = "fast"
    (tmp_path / "r.json").write_text(json.dumps(body), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"rows\[0\]\.first\.seconds"):
        results.read(tmp_path / "r.json")


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [([1.0], 99, 1.0), ([1.0, 2.0], 50, 1.5), ([3.0, 1.0, 2.0], 100, 3.0), ([float(n) for n in range(101)], 99, 99.0)],
)
def test_percentiles_are_interpolated(values, share, expected) -> None:
    assert percentile(values, share) == pytest.approx(expected)


def test_one_disturbed_run_does_not_move_a_percentile() -> None:
    runs = [a_run(1.0, [1.0, 2.0]), a_run(1.0, [1.0, 2.0]), a_run(9.0, [50.0, 90.0])]
    assert stage_percentile(runs, "decode", 100) == 2.0


def test_a_summary_has_medians_and_ranges() -> None:
    found = summarize([a_run(1.0, [1.0]), a_run(2.0, [1.0]), a_run(4.0, [1.0])])
    assert (found.seconds, found.out_per_s, found.in_per_s) == (2.0, 10.0, 5.0)
    assert found.range["out_per_s"] == (5.0, 20.0)
