"""`bench compare`: one run against another. Speed, latency and memory within limits, both correct, nothing on a fallback.

Everything is computed from the raw figures in the files: medians of throughput, percentiles of each stage of a request's
time, peaks of memory, and correctness (`judge`).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from vllm_core.bench import judge
from vllm_core.bench.likeness import Difference, differences, require
from vllm_core.bench.results import STAGES, Result, Row, stage_percentile
from vllm_core.errors import ConfigError

MIN_RATIO = 0.95
MAX_GROWTH = 0.10
FLOOR_S = 0.0005
"""A latency that grew by less than this is within what a host's clock and scheduler add to single requests."""

Verdict = Literal["pass", "fail", "no evidence"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Criterion:
    """One rule and what both files have to say. `slack` is how far from its limit it is, as a share of it; below 0 it fails."""

    name: str
    workload: str = ""
    a: str = ""
    b: str = ""
    change: str = ""
    limit: str = ""
    verdict: Verdict
    slack: float | None = None
    figure: bool = False
    """Whether it is a number with a limit; otherwise a rule of correctness."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """All criteria, and what differs between the two files beside the figures."""

    criteria: tuple[Criterion, ...]
    differences: tuple[Difference, ...]

    @property
    def failed(self) -> tuple[Criterion, ...]:
        """Those that do not hold."""
        return tuple(one for one in self.criteria if one.verdict == "fail")

    @property
    def deciding(self) -> Criterion:
        """What decides: the worst of those that fail, else the one nearest to its limit."""
        among = self.failed or self.criteria
        broken = [one for one in among if one.slack is None and one.verdict == "fail"]
        measured = [one for one in among if one.slack is not None]
        return broken[0] if broken else min(measured, key=lambda one: one.slack or 0.0)


def compare(a: Result, b: Result) -> Judgement:
    """Judge ``b`` against ``a``. Raises ConfigError where they are not alike, or have nothing to be judged by."""
    require(a, b)
    for name, one in (("A", a), ("B", b)):
        missing = _missing(one)
        if missing:
            raise ConfigError(
                "Result file is not whole",
                on=name,
                found=missing,
                expected="rows with runs, memory, evidence",
                fix="measure again with `vllm-core bench`",
            )
    pairs = list(zip(a.rows, b.rows, strict=True))
    criteria = [_speed(*pair) for pair in pairs]
    criteria += [_tail(*pair, stage) for pair in pairs for stage in STAGES]
    criteria += [*_memory(a, b), *_correct(a, b)]
    return Judgement(tuple(criteria), tuple(differences(a, b)))


def _missing(result: Result) -> str:
    """What there is nothing to compute from."""
    if result.evidence is None or result.memory is None or not result.rows:
        return "no rows, memory or evidence"
    for row in result.rows:
        if not row.runs:
            return f"no runs of {row.workload.name}"
        for run in (row.first, *row.runs):
            times = (*run.queue_s, *run.prefill_s, *run.decode_s)
            if (
                run.seconds <= 0
                or min(run.output_tokens, run.prompt_tokens) < 1
                or not all((run.queue_s, run.prefill_s, run.decode_s))
            ):
                return f"a run of {row.workload.name}, seed {run.seed}, in which nothing ran"
            if min(times) < 0:
                return f"a run of {row.workload.name}, seed {run.seed}, with a time below 0"
    return ""


def _speed(a: Row, b: Row) -> Criterion:
    """Medians of the rate that the workload is known by; seconds count as their inverse."""
    rate = a.workload.rate
    first, second = (statistics.median(getattr(run, rate) for run in row.runs) for row in (a, b))
    ratio = first / second if rate == "seconds" else second / first
    return Criterion(
        name="throughput",
        workload=a.workload.name,
        a=rate_text(rate, first),
        b=rate_text(rate, second),
        change=f"x {ratio:.3f}",
        limit=f">= x {MIN_RATIO}",
        verdict="pass" if ratio >= MIN_RATIO else "fail",
        slack=ratio / MIN_RATIO - 1,
        figure=True,
    )


def rate_text(rate: str, value: float) -> str:
    """A figure with its unit."""
    if rate == "seconds":
        return f"{value:.4g} s"
    return f"{value:,.1f} {'prompt ' if rate == 'in_per_s' else ''}tokens/s"


def _tail(a: Row, b: Row, stage: str) -> Criterion:
    first, second = stage_percentile(a.runs, stage, 99), stage_percentile(b.runs, stage, 99)
    growth = second / first - 1 if first else 0.0
    small = second - first < FLOOR_S
    return Criterion(
        name=f"p99 of {stage}",
        workload=a.workload.name,
        a=f"{1000 * first:.2f} ms",
        b=f"{1000 * second:.2f} ms",
        change=f"{growth:+.1%}",
        limit=f"<= +{MAX_GROWTH:.0%}, or < {1000 * FLOOR_S:g} ms more",
        verdict="pass" if growth <= MAX_GROWTH or small else "fail",
        slack=None if small and growth > MAX_GROWTH else (MAX_GROWTH - growth) / (1 + MAX_GROWTH),
        figure=True,
    )


def _memory(a: Result, b: Result) -> Iterator[Criterion]:
    """The peak, and the peak without the KV cache: a cache that fills what is left would hide what the rest has grown by."""
    assert a.memory is not None, "`compare` has looked"
    assert b.memory is not None, "`compare` has looked"
    for name, first, second in (
        ("peak memory", a.memory.peak_bytes, b.memory.peak_bytes),
        ("peak beside the KV cache", a.memory.beside_kv_bytes, b.memory.beside_kv_bytes),
    ):
        growth = second / first - 1 if first else 0.0
        yield Criterion(
            name=name,
            a=f"{first / 2**20:,.1f} MiB",
            b=f"{second / 2**20:,.1f} MiB",
            change=f"{growth:+.1%}",
            limit=f"<= +{MAX_GROWTH:.0%}",
            verdict="pass" if growth <= MAX_GROWTH else "fail",
            slack=(MAX_GROWTH - growth) / (1 + MAX_GROWTH),
            figure=True,
        )


def _correct(a: Result, b: Result) -> Iterator[Criterion]:
    yield _each("file is whole", judge.whole(a), judge.whole(b))
    assert a.evidence is not None, "`compare` has looked"
    assert b.evidence is not None, "`compare` has looked"
    yield _each("greedy takes the likeliest", judge.greedy(a), judge.greedy(b))
    alone = [
        judge.same(o.alone, o.together, judge.precision(r), dummy=r.model.dummy) for r, o in ((a, a.evidence), (b, b.evidence))
    ]
    yield _each("alone as with others", *alone)
    between = judge.precision(a, b)
    yield _both("tokens at fixed seeds", judge.same(a.evidence.alone, b.evidence.alone, between, dummy=a.model.dummy), between)
    yield _each("longest context", judge.longest(a), judge.longest(b))
    yield _both("end of the longest context", judge.same_longest(a, b), between)
    yield _each("a tool call parses", judge.tool_call(a), judge.tool_call(b))
    yield _each("no fallback in the Plan", judge.fallback(a), judge.fallback(b))
    yield _both("nothing went back to a reference", judge.new_references(a, b), "")


def _each(name: str, a: judge.Finding, b: judge.Finding) -> Criterion:
    """A rule about each file."""
    found = (a, b)
    verdict: Verdict = "fail" if any(o.problem for o in found) else "no evidence" if any(o.missing for o in found) else "pass"
    first, second = (one.problem or one.missing or one.detail for one in found)
    return Criterion(name=name, a=first, b=second, verdict=verdict)


def _both(name: str, found: judge.Finding, precision: str) -> Criterion:
    """A rule about the two."""
    verdict: Verdict = "fail" if found.problem else "no evidence" if found.missing else "pass"
    limit = f"{precision}, +-{judge.TOLERANCE[precision]:g}" if precision else ""
    return Criterion(name=name, change=found.problem or found.missing or found.detail, limit=limit, verdict=verdict)
