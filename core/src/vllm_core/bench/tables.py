"""Results and judgements as tables: for a terminal, as markdown, as CSV."""

from __future__ import annotations

import csv
import io
import statistics
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vllm_core.bench.compare import Criterion, Judgement, rate_text
from vllm_core.bench.results import STAGES, Result, Row, Start, summarize

MOST_DIFFERENCES = 12
MOST_CHARACTERS = 160


@dataclass(frozen=True, slots=True)
class Table:
    """Cells of text under heads."""

    title: str
    heads: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def of_result(result: Result) -> list[Table]:
    """The figures of a file."""
    plan = result.plan
    title = f"{result.model.name} on {max(1, len(plan.devices))} x {plan.device.name}, {plan.platform}, {plan.dtype}"
    if result.startup is not None:
        light = {name: values for name, values in result.startup.light.items() if values}
        quick = [(f"{name}", *_spread(values, "s")) for name, values in light.items()]
        return [
            Table(f"{title}: start", ("kernels", *_START_HEADS), list(_starts(result))),
            Table("Light commands", ("command", "median", "range"), quick),
        ]
    latency = [(row.workload.name, stage, *_percentiles(row, stage)) for row in result.rows for stage in STAGES]
    return [
        Table(title, ("workload", "requests", "median", "range", "first run"), [rate_row(row) for row in result.rows]),
        Table("Of a request's time", ("workload", "stage", "p50", "p90", "p99"), latency),
        Table("Memory", ("of", "MiB"), list(_memory(result))),
    ]


def rate_row(row: Row) -> tuple[str, ...]:
    """One workload by the rate that it is known by."""
    rate = row.workload.rate
    values = [getattr(run, rate) for run in row.runs]
    first = getattr(row.first, rate)
    median, spread = statistics.median(values), f"{min(values):,.4g} to {max(values):,.4g}"
    return row.workload.name, row.workload.title, rate_text(rate, median), spread, rate_text(rate, first)


def _percentiles(row: Row, stage: str) -> tuple[str, ...]:
    found = (row.summary or summarize(row.runs)).latency_s[stage]
    return tuple(f"{1000 * value:.2f} ms" for value in found.values())


def _memory(result: Result) -> Iterator[tuple[str, str]]:
    if result.memory is not None:
        sizes = {**result.memory.pools, "peak": result.memory.peak_bytes, "host peak": result.memory.host_peak_bytes}
        yield from ((name, f"{size / 2**20:,.1f}") for name, size in sizes.items())


_START_HEADS = ("accepts", "first token", "80 % of its rate", "first run", "stages")


def _starts(result: Result) -> Iterator[tuple[str, ...]]:
    if result.startup is not None:
        yield ("cold", *start_row(result.startup.cold))
        yield from (("cached", *start_row(one)) for one in result.startup.cached)


def start_row(one: Start) -> tuple[str, ...]:
    """One start: when it accepts, its first token, its full speed, and where the time went."""
    full = "not in its first run" if one.full_speed_s is None else f"{one.full_speed_s:.2f} s"
    stages = ", ".join(f"{name} {value:.2f}" for name, value in one.stages.items())
    return f"{one.accepts_s:.2f} s", f"{one.first_token_s:.2f} s", full, f"at {one.first_share:.0%}", stages


def _spread(values: Sequence[float], unit: str) -> tuple[str, str]:
    return f"{statistics.median(values):.3f} {unit}", f"{min(values):.3f} to {max(values):.3f}"


def of_judgement(found: Judgement) -> list[Table]:
    """The figures, the rules of correctness, and what else differs; what decides is marked."""

    def shown(one: Criterion) -> str:
        return f"{one.verdict}{', decides' if one is found.deciding else ''}"

    figures = [one for one in found.criteria if one.figure]
    heads = ("criterion", "workload", "A", "B", "change", "limit", "verdict")
    rows = [(one.name, one.workload, one.a, one.b, one.change, one.limit, shown(one)) for one in figures]
    rules = [one for one in found.criteria if not one.figure]
    made = [Table("B against A", heads, rows)]
    made.append(Table("Correctness", ("rule", "verdict", "found"), [(one.name, shown(one), _said(one)) for one in rules]))
    if found.differences:
        some = list(found.differences[:MOST_DIFFERENCES])
        left = len(found.differences) - len(some)
        more = [("and more", str(left), "in the JSON of --out")] if left else []
        made.append(Table("What else differs", ("what", "A", "B"), [*some, *more]))
    return made


def _said(one: Criterion) -> str:
    if one.change:
        return f"{one.change} ({one.limit})" if one.limit else one.change
    return one.a if one.a == one.b else f"A: {one.a}; B: {one.b}"


def verdict(found: Judgement) -> str:
    """One line: passed or failed, and by what."""
    one = found.deciding
    where = f" of {one.workload}" if one.workload else ""
    figures = f"{one.change}, limit {one.limit}" if one.figure else textwrap.shorten(_said(one), MOST_CHARACTERS)
    if found.failed:
        return f"FAILED by {len(found.failed)} of {len(found.criteria)} criteria; {one.name}{where} decides: {figures}"
    return f"PASSED; nearest to its limit is {one.name}{where}: {figures}"


def markdown(tables: Sequence[Table]) -> str:
    """GitHub's tables, one below the other."""
    parts = []
    for table in tables:
        lines = [f"**{_escaped(table.title)}**", "", _line(table.heads), _line(["---"] * len(table.heads))]
        parts.append("\n".join([*lines, *map(_line, table.rows)]))
    return "\n\n".join(parts) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(_escaped, cells))} |"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def csv_of_result(result: Result) -> str:
    """A line for each run or start: numbers alone, for other tools."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    facts = (result.model.name, result.plan.platform, result.plan.device.name, result.plan.dtype)
    if result.startup is not None:
        writer.writerow(("model", "platform", "device", "dtype", "kernels", "accepts_s", "first_token_s", "full_speed_s"))
        starts = [("cold", result.startup.cold), *(("cached", one) for one in result.startup.cached)]
        writer.writerows((*facts, kind, one.accepts_s, one.first_token_s, one.full_speed_s) for kind, one in starts)
        return out.getvalue()
    stages = [f"{stage}_p{share}_s" for stage in STAGES for share in (50, 99)]
    figures = ("seconds", "out_per_s", "in_per_s")
    writer.writerow(("model", "platform", "device", "dtype", "workload", "run", "seed", *figures, *stages))
    for row in result.rows:
        for number, run in enumerate((row.first, *row.runs)):
            known = summarize([run]).latency_s
            times = [known[stage][f"p{share}"] for stage in STAGES for share in (50, 99)]
            name = str(number) if number else "first"
            writer.writerow((*facts, row.workload.name, name, run.seed, *(getattr(run, f) for f in figures), *times))
    return out.getvalue()


def csv_of_judgement(found: Judgement) -> str:
    """A line for each criterion."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("criterion", "workload", "A", "B", "change", "limit", "slack", "verdict"))
    for one in found.criteria:
        writer.writerow((one.name, one.workload, one.a, one.b, one.change, one.limit, one.slack, one.verdict))
    return out.getvalue()
