"""What rows and waivers come to."""

from __future__ import annotations

from datetime import date

import pytest

from vllm_conformance.verdict import EXIT_STATUS, judge
from vllm_conformance.waivers import Waiver

TODAY = date(2026, 5, 1)


def waiver(id_, expiry=TODAY):
    return Waiver(id=id_, link="https://example.org/1", owner="jane", expiry=expiry)


def judged(rows, *waivers, level=4, subset=None):
    return judge(rows, waivers, today=TODAY, level=level, subset=subset)


@pytest.mark.parametrize("outcome", ["PASS", "REFUSED"])
def test_good_rows_are_conformant(row, outcome):
    found = judged([row("L0/a", outcome), row("L1/a", outcome)])
    assert (found.result, found.reached) == ("CONFORMANT", 4)


@pytest.mark.parametrize("outcome", ["FAIL", "CRASH", "HANG", "UNDERCLAIMED", "BAD_REFUSAL", "ILLEGAL_SKIP"])
def test_one_bad_row_is_not_conformant_and_ends_the_level(row, outcome):
    found = judged([row("L0/a"), row("L1/a"), row("L2/a", outcome), row("L2/b"), row("L3/a")])
    assert (found.result, found.reached) == ("NOT_CONFORMANT", 1)
    assert EXIT_STATUS[found.result] == 1


def test_what_did_not_run_is_incomplete_even_beside_a_failure(row):
    found = judged([row("L0/a", "FAIL"), row("L1/a", "NOT_RUN")])
    assert (found.result, EXIT_STATUS[found.result]) == ("INCOMPLETE", 3)


def test_nothing_at_all_is_incomplete(row):
    assert judged([]).result == "INCOMPLETE"
    assert judged([row("L5/a")]).result == "INCOMPLETE"


@pytest.mark.parametrize("outcome", ["FAIL", "CRASH", "NOT_RUN"])
def test_level_5_is_not_judged(row, outcome):
    found = judged([row("L0/a"), row("L5/a", outcome)], level=5)
    assert (found.result, found.reached) == ("CONFORMANT", 4)


def test_the_level_reached_is_no_higher_than_what_was_asked_for(row):
    assert judged([row("L0/a"), row("L1/a")], level=1).reached == 1


@pytest.mark.parametrize("outcome", ["FAIL", "CRASH", "HANG", "UNDERCLAIMED", "BAD_REFUSAL"])
def test_a_waiver_makes_it_waived(row, outcome):
    found = judged([row("L0/a"), row("L1/a", outcome)], waiver("L1/a"))
    assert [one.verdict for one in found.rows] == ["PASS", "WAIVED"]
    assert (found.rows[1].outcome, found.rows[1].waiver) == (outcome, "L1/a")
    assert (found.result, found.waivers[0].verdict) == ("CONFORMANT", "USED")


@pytest.mark.parametrize("outcome", ["ILLEGAL_SKIP", "NOT_RUN"])
def test_what_nobody_saw_cannot_be_waived(row, outcome):
    found = judged([row("L1/a", outcome)], waiver("L1/a"))
    assert found.rows[0].verdict == outcome
    assert found.result != "CONFORMANT"


@pytest.mark.parametrize(
    ("waived", "level", "subset", "verdict"),
    [
        (waiver("L1/b"), 4, None, "STALE"),
        (waiver("L1/*"), 4, None, "STALE"),
        (waiver("L1/nothing"), 4, None, "UNMATCHED"),
        (waiver("L1/a", date(2026, 4, 30)), 4, None, "EXPIRED"),
        (waiver("L3/nothing"), 2, None, "NOT_JUDGED"),
        (waiver("L1/nothing"), 4, "ci", "NOT_JUDGED"),
        (waiver("L2/left"), 4, None, "NOT_JUDGED"),
    ],
)
def test_a_waiver_is_judged_too(row, waived, level, subset, verdict):
    found = judged([row("L1/a", "FAIL"), row("L1/b"), row("L2/left", "NOT_RUN")], waived, level=level, subset=subset)
    assert [one.verdict for one in found.waivers] == [verdict]


@pytest.mark.parametrize("waived", [waiver("L1/b"), waiver("L1/nothing"), waiver("L1/b", date(2026, 4, 30))])
def test_a_waiver_that_is_bad_makes_the_run_bad(row, waived):
    found = judged([row("L0/a"), row("L1/b")], waived)
    assert (found.result, found.reached) == ("NOT_CONFORMANT", 0)


def test_the_last_day_of_a_waiver_counts(row):
    assert judged([row("L1/a", "FAIL")], waiver("L1/a", TODAY)).result == "CONFORMANT"


def test_verdicts_that_rows_bring_with_them_are_not_believed(row):
    found = judged([row("L1/a", "FAIL", verdict="PASS", waiver="L1/a")])
    assert (found.rows[0].verdict, found.rows[0].waiver) == ("FAIL", None)
