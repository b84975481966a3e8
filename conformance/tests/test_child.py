"""What a case may return and raise, and what becomes of it."""

from __future__ import annotations

import unittest

import pytest

from vllm_conformance.case import Case, Evidence, MissingDeviceError
from vllm_conformance.child import run
from vllm_conformance.collect import collect
from vllm_conformance.protocol import MAX_DETAIL_CHARS, Done, Task, decode_answer, encode
from vllm_core.errors import ConfigError

result = None


def case_function(subject, params):
    """Returns `result`, or raises it."""
    if isinstance(result, BaseException):
        raise result
    return result


class Quiet:
    """A subject of which nothing is asked."""

    def announce(self, done): ...


@pytest.fixture
def outcome_of(monkeypatch):
    """Run a case that returns or raises the value."""

    def go(value):
        monkeypatch.setattr("vllm_conformance.child.load_entry", lambda entry: case_function)
        monkeypatch.setitem(globals(), "result", value)
        done = run(Task(case=Case("L1/a", 1, "g", "small", "m:f")), Quiet())
        assert decode_answer(encode(done)) == done
        return done

    return go


def test_evidence_is_handed_on(outcome_of):
    evidence = Evidence("REFUSED", "why", seed=3, digest="ab", calls={"kernel": 1}, measured={"x_s": 0.5})
    assert outcome_of(evidence) == Done(evidence=evidence)


@pytest.mark.parametrize(
    ("raised", "outcome", "detail"),
    [
        (AssertionError("7 of 8"), "FAIL", "AssertionError: 7 of 8"),
        (KeyError("x"), "FAIL", "KeyError: 'x'"),
        (SystemExit(0), "FAIL", "SystemExit"),
        (unittest.SkipTest("not here"), "ILLEGAL_SKIP", "not here"),
        (pytest.skip.Exception("not today"), "ILLEGAL_SKIP", "not today"),
    ],
)
def test_what_is_raised_becomes_an_outcome(outcome_of, raised, outcome, detail):
    done = outcome_of(raised)
    assert (done.evidence.outcome, done.not_run) == (outcome, False)
    assert detail in done.evidence.detail


def test_a_missing_device_is_no_failure(outcome_of):
    done = outcome_of(MissingDeviceError("Not enough devices", on="x", found="1", expected="2", fix="-"))
    assert done.not_run
    assert done.evidence.detail == "Not enough devices: 1"


@pytest.mark.parametrize(
    ("value", "detail"),
    [
        (None, "NoneType, not Evidence"),
        (True, "bool, not Evidence"),
        (Evidence("GREAT"), "the outcome 'GREAT'"),
        (Evidence("CRASH"), "the outcome 'CRASH'"),
        (Evidence(calls={"kernel": "many"}), "wrong evidence"),
        (Evidence(measured={"x_s": float("nan")}), "wrong evidence"),
        (Evidence(seed=object()), "wrong evidence"),
    ],
)
def test_what_is_no_evidence_fails(outcome_of, value, detail):
    done = outcome_of(value)
    assert done.evidence.outcome == "FAIL"
    assert detail in done.evidence.detail


def test_a_long_detail_is_cut(outcome_of):
    assert len(outcome_of(Evidence("FAIL", "x" * 10**6)).evidence.detail) == MAX_DETAIL_CHARS


class Module:
    """A module of cases."""

    def __init__(self, *cases):
        self.cases = cases

    def collect(self, claims, offers, facts):
        yield from self.cases


def case(id_="L1/a", level=1, size="small"):
    return Case(id_, level, "g", size, "m:f")


def test_cases_come_by_level():
    found = collect({}, (), None, modules=[Module(case("L2/a", 2), case("L1/b")), Module(case("L0/c", 0), case("L1/a"))])
    assert [one.id for one in found] == ["L0/c", "L1/b", "L1/a", "L2/a"]


@pytest.mark.parametrize(
    ("cases", "problem"),
    [
        ([case(), case()], "not unique"),
        ([case("L2/a", 1)], "does not begin with L1/"),
        ([case("L7/a", 7)], "does not begin"),
        ([case("L1/a b")], "white space"),
        ([case(size="huge")], "no such size: huge"),
    ],
)
def test_cases_that_lists_could_not_hold_are_an_error(cases, problem):
    with pytest.raises(ConfigError, match=problem):
        collect({}, (), None, modules=[Module(*cases)])
