"""`bench host` on small grids: what it reports and how it leaves the engine, never how long anything took."""

from __future__ import annotations

import json
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from vllm_core.bench import host
from vllm_core.cli import bench as command
from vllm_core.cli.main import main

GRID = [(1, 0), (2, 3)]
DECODING = {"batch_update", "build_step", "sample", "advance", "model.forward", "model.logits"}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    out = tmp_path_factory.mktemp("bench") / "host.json"
    return host.run(GRID, 4, out, platform="cpu", enforce_eager=True), json.loads(out.read_text(encoding="utf-8"))


def test_there_is_a_row_for_each_pair_in_order(measured) -> None:
    rows, _ = measured
    assert [(row.running, row.waiting, row.steps) for row in rows] == [(1, 0, 4), (2, 3, 4)]


def test_every_number_of_a_row_is_there(measured) -> None:
    for row in measured[0]:
        assert 0 < row.p05_us <= row.median_us <= row.p95_us
        assert min(row.cpu_us, row.detokenize_us, row.admit_us) > 0
        assert tuple(row.stages_us) == host.STAGES
        assert min(row.stages_us.values()) > 0


def test_each_op_of_a_decode_step_is_called_once_and_timed(measured) -> None:
    for row in measured[0]:
        assert row.op_calls == dict.fromkeys(row.op_calls, 1.0)
        assert set(row.op_calls) == set(row.ops_us) == DECODING
        assert min(row.ops_us.values()) > 0


def test_the_file_holds_the_rows(measured) -> None:
    rows, written = measured
    assert written == [asdict(row) for row in rows]


def test_both_tables_are_printed(capsys) -> None:
    host.run([(1, 2)], 2, None, platform="cpu", enforce_eager=True)
    shown = capsys.readouterr().out
    assert shown.count("1:2") == 2
    assert all(name in shown for name in (*host.STAGES, *DECODING))


def test_no_sequence_ends_while_steps_are_measured() -> None:
    assert host.PROMPT_TOKENS + 1 + host.WARM_STEPS + 3 * command.MAX_STEPS < host.CONTEXT


class Worker:
    def __init__(self) -> None:
        self.bound = lambda value: value + 1

    def method(self, value: int) -> int:
        if value < 0:
            raise ValueError(value)
        return self.bound(value)


def test_watching_counts_calls_and_passes_values_through() -> None:
    worker, seen = Worker(), []
    places = [(worker, "method", "outer"), (worker, "bound", "inner")]
    spent = host._watched(places, lambda: seen.append(worker.method(3)), 5)
    assert seen == [4] * 5
    assert {name: len(times) for name, times in spent.items()} == {"outer": 5, "inner": 5}


@pytest.mark.parametrize("value", [1, -1])
def test_watching_leaves_callables_as_they_were(value) -> None:
    worker = Worker()
    bound = worker.bound
    try:
        host._watched([(worker, "method", "outer"), (worker, "bound", "inner")], lambda: worker.method(value), 1)
    except ValueError:
        assert value < 0
    assert vars(worker) == {"bound": bound}


def test_a_program_that_is_not_cores_own_has_no_calls_to_stand_before() -> None:
    assert host._calls_of(SimpleNamespace(_core=SimpleNamespace(program=object()))) == []


@pytest.mark.parametrize(
    "argv",
    [
        ["--grid", "1"],
        ["--grid", "0:10"],
        ["--grid", "1:-1"],
        ["--grid", "1:2:3"],
        ["--grid", "1:10,"],
        ["--grid", ""],
        ["--grid", "a:b"],
        ["--steps", "0"],
        ["--steps", "-5"],
        ["--steps", "1.5"],
        ["--steps", str(command.MAX_STEPS + 1)],
        ["--platform", "no-such-platform", "--grid", "1:0"],
        ["--stepz", "3"],
    ],
)
def test_a_wrong_option_is_an_error_of_four_parts(argv, capsys) -> None:
    assert main(["bench", "host", *argv]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: ")
    assert all(part in shown for part in ("found:", "expected:", "fix:"))


@pytest.mark.parametrize(("text", "pairs"), [("1:10", [(1, 10)]), ("1:0,256:100000", [(1, 0), (256, 100000)])])
def test_a_grid_is_pairs_of_running_and_waiting(text, pairs) -> None:
    assert command._grid(text) == pairs


def test_the_default_grid_can_be_read() -> None:
    assert len(command._grid(command.GRID)) == 6
