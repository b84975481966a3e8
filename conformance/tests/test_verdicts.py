"""Each verdict has a plugin that is broken in just that way, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace
from datetime import date, timedelta

import pytest

from vllm_conformance.pool import MAX_LOST
from vllm_conformance.run import run
from vllm_conformance.verdict import EXIT_STATUS
from vllm_conformance.waivers import Waiver
from vllm_core.errors import PlatformError

TODAY = date.today()
ADDS = {"L1/add/seed0", "L1/add/seed1", "L1/add/seed2"}


def verdicts(report):
    return {row.id: row.verdict for row in report.rows}


def waiver(id_, days=30):
    return Waiver(id=id_, link="https://example.org/1", owner="jane", expiry=TODAY + timedelta(days=days))


def test_a_right_platform_is_conformant(run_with):
    report = run_with()
    assert verdicts(report) == {
        "L0/loads": "PASS",
        **dict.fromkeys(ADDS, "PASS"),
        "L1/no_graphs": "REFUSED",
        "L5/speed": "PASS",
    }
    assert (report.result, report.reached, EXIT_STATUS[report.result]) == ("CONFORMANT", 4, 0)


@pytest.mark.parametrize(
    ("fault", "rows", "verdict", "detail"),
    [
        ("wrong", ADDS, "FAIL", "at 0: "),
        ("crash", ADDS, "CRASH", "ended by SIGSEGV"),
        ("exit", ADDS, "CRASH", "ended with status 0"),
        ("skip", ADDS, "ILLEGAL_SKIP", "not today"),
        ("underclaimed", {"L1/no_graphs"}, "UNDERCLAIMED", "capture works"),
        ("bad refusal", {"L1/no_graphs"}, "BAD_REFUSAL", "ValueError: no"),
        ("device raises", {*ADDS, "L1/no_graphs"}, "FAIL", "OSError: no context"),
    ],
)
def test_a_broken_platform_is_given_the_verdict_and_the_other_cases_run(run_with, fault, rows, verdict, detail):
    report = run_with(fault)
    found = verdicts(report)
    assert {id_: one for id_, one in found.items() if id_ in rows} == dict.fromkeys(rows, verdict)
    others = {id_: one for id_, one in found.items() if id_ not in rows}
    assert set(others.values()) <= {"PASS", "REFUSED"}
    assert all(detail in row.detail for row in report.rows if row.id in rows)
    assert (report.result, report.reached, EXIT_STATUS[report.result]) == ("NOT_CONFORMANT", 0, 1)


def test_a_crash_keeps_what_the_process_said_last(run_with):
    (row, *_) = [row for row in run_with("crash", only=("L1/add/seed0",)).rows if row.outcome == "CRASH"]
    assert "Segmentation fault" in row.detail
    assert "add" in row.detail


def test_a_hang_is_one_row_and_is_over_at_the_time_limit(run_with):
    report = run_with("hang", only=("L1/add/seed1", "L1/no_graphs"), limits_s={"small": 2.0, "medium": 60.0, "large": 60.0})
    rows = {row.id: row for row in report.rows}
    assert rows["L1/add/seed1"].verdict == "HANG"
    assert "no answer within 2 s" in rows["L1/add/seed1"].detail
    assert rows["L1/no_graphs"].verdict == "REFUSED"


def test_a_device_that_does_not_open_has_the_longest_limit_and_is_a_hang(run_with):
    report = run_with("device hangs", only=("L1/no_graphs",), limits_s={"small": 20.0, "medium": 60.0, "large": 1.5})
    rows = {row.id: row for row in report.rows}
    assert rows["L1/no_graphs"].verdict == "HANG"
    assert "nothing imported or opened within 1.5 s" in rows["L1/no_graphs"].detail


def test_a_missing_device_leaves_the_run_incomplete(run_with):
    report = run_with("no device")
    assert verdicts(report) == {"L0/loads": "PASS", **{f"L{level}/*": "NOT_RUN" for level in range(1, 6)}}
    assert "libbroken.so" in report.platform.problem
    assert (report.result, report.reached, EXIT_STATUS[report.result]) == ("INCOMPLETE", 0, 3)


def test_a_second_device_that_is_claimed_and_missing_leaves_the_run_incomplete(run_with):
    report = run_with("claims a peer")
    assert verdicts(report)["L1/peer"] == "NOT_RUN"
    assert report.result == "INCOMPLETE"


@pytest.mark.parametrize("fault", ["probe crashes", "describing crashes"])
def test_a_platform_that_dies_while_it_is_looked_at_is_incomplete_with_the_cause(run_with, fault):
    report = run_with(fault)
    assert "SIGSEGV" in report.platform.problem
    assert report.result == "INCOMPLETE"
    assert verdicts(report)["L0/loads"] == "PASS"


def test_a_choice_of_cases_leaves_the_run_incomplete(run_with):
    report = run_with(only=("L1/*",))
    assert verdicts(report)["L0/loads"] == "NOT_RUN"
    assert report.result == "INCOMPLETE"


def test_maxfail_leaves_the_run_incomplete(run_with):
    report = run_with("wrong", maxfail=1, jobs=1)
    found = [row.verdict for row in report.rows if row.id in ADDS]
    assert found.count("FAIL") == 1
    assert found.count("NOT_RUN") == 2
    assert report.result == "INCOMPLETE"


def test_a_case_that_the_list_asks_for_and_nobody_generates_is_not_run(run_with, small_lists):
    from vllm_conformance import lists

    texts = {path.name: path.read_text() for path in small_lists.glob("L*.txt")}
    lists.write_lists({**texts, "L0.txt": texts["L0.txt"] + "L0/vanished\n"}, small_lists)
    report = run_with()
    assert verdicts(report)["L0/vanished"] == "NOT_RUN"
    assert report.result == "INCOMPLETE"


def test_a_waived_failure_is_good(run_with):
    report = run_with("wrong", waivers=(waiver("L1/add/*"),))
    assert {row.verdict for row in report.rows if row.id in ADDS} == {"WAIVED"}
    assert {row.outcome for row in report.rows if row.id in ADDS} == {"FAIL"}
    assert [one.verdict for one in report.waivers] == ["USED"]
    assert (report.result, report.reached) == ("CONFORMANT", 4)


def test_an_expired_waiver_waives_nothing_and_is_bad(run_with):
    report = run_with("wrong", waivers=(waiver("L1/add/*", days=-1),))
    assert {row.verdict for row in report.rows if row.id in ADDS} == {"FAIL"}
    assert [one.verdict for one in report.waivers] == ["EXPIRED"]
    assert report.result == "NOT_CONFORMANT"


@pytest.mark.parametrize(("id_", "verdict"), [("L1/add/*", "STALE"), ("L1/sub/*", "UNMATCHED")])
def test_a_waiver_that_nothing_needs_is_bad(run_with, id_, verdict):
    report = run_with(waivers=(waiver(id_),))
    assert [one.verdict for one in report.waivers] == [verdict]
    assert report.result == "NOT_CONFORMANT"
    assert report.reached == int(id_[1]) - 1


def test_a_skip_cannot_be_waived(run_with):
    report = run_with("skip", waivers=(waiver("L1/add/*"),))
    assert {row.verdict for row in report.rows if row.id in ADDS} == {"ILLEGAL_SKIP"}


def test_a_subset_runs_its_own_cases_and_judges_no_waiver_of_the_others(run_with):
    report = run_with(subset="ci", waivers=(waiver("L1/add/seed2"),))
    assert set(verdicts(report)) == {"L0/loads", "L1/add/seed0", "L1/no_graphs"}
    assert [one.verdict for one in report.waivers] == ["NOT_JUDGED"]
    assert report.result == "CONFORMANT"


def test_speed_is_reported_and_not_judged(run_with):
    (row,) = [row for row in run_with().rows if row.level == 5]
    assert row.measured == {"adds_per_s": 5.0}


def test_a_platform_that_is_not_installed_is_an_error_with_the_nearest_name(install, options):
    install()
    with pytest.raises(PlatformError, match="did you mean 'broken'"):
        run(replace(options, platform="brokn"))


def test_a_device_that_keeps_dying_is_given_up(run_with, monkeypatch):
    monkeypatch.setattr("vllm_conformance.pool.MAX_LOST", 2)
    report = run_with("crash", jobs=1)
    assert MAX_LOST > 2
    assert sorted(row.verdict for row in report.rows if row.id in ADDS) == ["CRASH", "CRASH", "NOT_RUN"]
    assert report.result == "INCOMPLETE"


def test_what_a_plugin_prints_is_not_taken_for_an_answer(run_with):
    assert run_with("prints").result == "CONFORMANT"


def test_a_platform_that_serves_no_op_is_asked_for_everything_else(install, options):
    install(**{'[Offer(provider="broken", ops={"add": f"{__name__}:add"})]': "[]"})
    report = run(options)
    assert report.providers == {}
    assert verdicts(report) == {"L0/loads": "PASS", "L1/no_graphs": "REFUSED", "L5/speed": "PASS"}
    assert report.reached == 4
