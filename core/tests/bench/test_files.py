"""What ``--out`` writes: markdown, CSV and plots of results and judgements."""

from __future__ import annotations

import csv
import json
import re

import pytest
from msgspec.structs import replace as changed

from vllm_core.bench import compare, files, plots, tables
from vllm_core.bench.results import Start, Startup
from vllm_core.bench.workloads import WORKLOADS
from vllm_core.errors import ConfigError

SIGNATURES = {".png": b"\x89PNG\r\n", ".svg": b"<?xml"}


@pytest.fixture(scope="module")
def started(result):
    """A result of starts, made up."""
    one = Start(
        stages={"interpreter": 0.1, "warmup": 2.0},
        accepts_s=2.1,
        first_token_s=2.2,
        full_speed_s=None,
        first_share=0.7,
        tokens=[(0.0, 0), (1.0, 10)],
        steady=[(0.0, 0), (0.7, 10)],
    )
    light = {"python": [0.1, 0.2], "import vllm_core": [0.3]}
    starts = Startup(workload=WORKLOADS["throughput"], cold=one, cached=[one, one], light=light, modules={})
    return changed(result, kind="startup", rows=[], memory=None, evidence=None, startup=starts)


@pytest.fixture(scope="module")
def judgement(result):
    return compare.compare(result, changed(result, max_model_len=result.max_model_len))


def test_markdown_has_a_line_for_each_workload(result) -> None:
    text = tables.markdown(tables.of_result(result))
    for row in result.rows:
        assert re.search(rf"^\| {row.workload.name} \| {row.workload.requests} x .* \|$", text, re.MULTILINE)
        assert len(re.findall(rf"^\| {row.workload.name} \| (?:queue|prefill|decode) \|", text, re.MULTILINE)) == 3


def test_every_row_of_a_markdown_table_has_as_many_cells_as_its_head(result, judgement) -> None:
    for table in (*tables.of_result(result), *tables.of_judgement(judgement)):
        assert {len(row) for row in table.rows} <= {len(table.heads)}


def test_a_bar_in_a_cell_does_not_break_the_table() -> None:
    assert tables.markdown([tables.Table("t", ("a",), [("x|y\nz",)])]).splitlines()[-1] == "| x\\|y z |"


def test_csv_has_a_line_for_each_run_with_numbers(result) -> None:
    lines = list(csv.DictReader(tables.csv_of_result(result).splitlines()))
    assert [(one["workload"], one["run"]) for one in lines] == [
        (row.workload.name, run) for row in result.rows for run in ("first", "1", "2")
    ]
    assert float(lines[0]["seconds"]) == result.rows[0].first.seconds


def test_csv_of_starts_has_a_line_for_each(started) -> None:
    lines = list(csv.DictReader(tables.csv_of_result(started).splitlines()))
    assert [(one["kernels"], one["accepts_s"], one["full_speed_s"]) for one in lines] == [
        ("cold", "2.1", ""),
        ("cached", "2.1", ""),
        ("cached", "2.1", ""),
    ]


def test_a_start_that_missed_its_rate_is_shown_as_such(started) -> None:
    assert "not in its first run" in tables.markdown(tables.of_result(started))


@pytest.mark.parametrize("form", SIGNATURES)
@pytest.mark.parametrize("what", ["result", "started", "judgement"])
def test_plots_are_drawn(form, what, request, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"plot{form}"
    files.save(request.getfixturevalue(what), [path])
    assert path.read_bytes().startswith(SIGNATURES[form])


def test_plots_without_matplotlib_are_refused_before_anything_is_measured(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="Plots need matplotlib"):
        files.check([tmp_path / "a.svg"])
    files.check([tmp_path / "a.json", tmp_path / "a.md", tmp_path / "a.csv"])


@pytest.mark.parametrize(("name", "match"), [("a.txt", "no form"), ("a", "no form"), ("none/a.json", "cannot be written")])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(name, match, tmp_path) -> None:
    with pytest.raises(ConfigError, match=match):
        files.check([tmp_path / name])


def test_a_judgement_is_written_with_what_decides(judgement, tmp_path) -> None:
    files.save(judgement, [tmp_path / "c.json", tmp_path / "c.md", tmp_path / "c.csv"])
    body = json.loads((tmp_path / "c.json").read_text(encoding="utf-8"))
    assert (body["passed"], body["decides"], len(body["criteria"])) == (True, judgement.deciding.name, len(judgement.criteria))
    assert (tmp_path / "c.md").read_text(encoding="utf-8").startswith("PASSED; nearest to its limit is")
    lines = list(csv.DictReader((tmp_path / "c.csv").read_text(encoding="utf-8").splitlines()))
    assert [one["criterion"] for one in lines] == [one.name for one in judgement.criteria]


def test_a_verdict_names_the_criterion_that_decides(result) -> None:
    rows = [changed(row, runs=[changed(run, seconds=2 * run.seconds) for run in row.runs]) for row in result.rows]
    text = tables.verdict(compare.compare(result, changed(result, rows=rows)))
    assert text.startswith("FAILED by 2 of ")
    assert "throughput of throughput decides: x 0.500, limit >= x 0.95" in text
