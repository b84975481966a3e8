"""The report for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm_conformance.report import Report, by_reference, calls_by_op
from vllm_conformance.verdict import BAD_WAIVERS, GOOD, JUDGED_LEVELS, Row
from vllm_core.registry.explain import table

if TYPE_CHECKING:
    from rich.console import RenderableType

VERDICTS = ("PASS", "REFUSED", "WAIVED", "FAIL", "CRASH", "HANG", "UNDERCLAIMED", "BAD_REFUSAL", "ILLEGAL_SKIP", "NOT_RUN")
MOST_BAD = 30
MOST_DETAIL_CHARS = 300


def to_table(report: Report) -> RenderableType:
    """Counts by level, calls by op, what is bad, and the result."""
    from rich.console import Group

    seen = [name for name in VERDICTS if any(row.verdict == name for row in report.rows)]
    parts = [table("Levels", ("level", *seen, "seconds"), _levels(report, seen)), table("Calls", _CALLS, _calls(report))]
    bad = bad_rows(report)
    if bad:
        rows = [(row.verdict, row.id, row.detail[:MOST_DETAIL_CHARS]) for row in bad[:MOST_BAD]]
        title = f"Bad: {len(bad)}" + (f", the first {MOST_BAD}" if len(bad) > MOST_BAD else "")
        parts.append(table(title, ("verdict", "case", "detail"), rows))
    waivers = [(one.verdict, one.id, one.owner, str(one.expiry)) for one in report.waivers]
    if waivers:
        parts.append(table("Waivers", ("verdict", "id", "owner", "expiry"), waivers))
    measured = [(row.id, ", ".join(f"{name} {value:g}" for name, value in row.measured.items())) for row in report.rows]
    if any(values for _, values in measured):
        parts.append(table("Measured", ("case", "values"), [pair for pair in measured if pair[1]]))
    return Group(*parts, *summary(report))


def bad_rows(report: Report) -> list[Row]:
    """What to look at: bad rows of the levels that are judged. What did not run is only counted."""
    return [row for row in report.rows if row.verdict not in GOOD | {"NOT_RUN"} and row.level in JUDGED_LEVELS]


def summary(report: Report) -> list[str]:
    """The result in a few lines."""
    where = report.devices[0].name if report.devices else "no device"
    what = f"subset {report.subset}" if report.subset else f"levels 0 to {report.level}"
    left = [row for row in report.rows if row.verdict == "NOT_RUN" and row.level in JUDGED_LEVELS]
    lines = [
        f"{report.result}: {report.platform.distribution} {report.versions.plugin} on {where}, {what}, "
        f"{len(report.rows)} rows in {report.seconds:g} s",
    ]
    if report.simulated:
        lines.append(f"simulated, not run on hardware: {report.simulated}")
    if report.denied:
        lines.append(f"left out, so that nothing is said of it: {', '.join(report.denied)}")
    if report.subset is None:
        lines.append(f"level reached: {f'L{report.reached}' if report.reached >= 0 else 'none'}")
    if left:
        lines.append(f"not run: {len(left)} cases, such as {left[0].id}: {left[0].detail.partition(chr(10))[0]}")
    references = by_reference(report.rows)
    if references:
        lines.append(f"by core's references: {', '.join(references)}")
    bad_waivers = [one.id for one in report.waivers if one.verdict in BAD_WAIVERS]
    if bad_waivers:
        lines.append(f"waivers to be looked at: {', '.join(bad_waivers)}")
    if report.dirty:
        lines.append(f"not from a commit or a wheel, so `verify` will refuse it: {', '.join(report.dirty)}")
    return lines


def _levels(report: Report, seen: Sequence[str]) -> list[tuple[str, ...]]:
    lines = []
    for level in sorted({row.level for row in report.rows}):
        rows = [row for row in report.rows if row.level == level]
        counts = Counter[str](row.verdict for row in rows)
        lines.append((f"L{level}", *(str(counts[name] or "") for name in seen), f"{sum(row.seconds for row in rows):.1f}"))
    return lines


_CALLS = ("op", "kernel", "vendor", "reference", "host")


def _calls(report: Report) -> list[tuple[str, ...]]:
    counts = calls_by_op(report.rows)
    return [(op, *(str(counts[op][kind] or "") for kind in _CALLS[1:])) for op in sorted(counts) if counts[op]]
