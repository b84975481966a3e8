"""Plots of results and judgements, with matplotlib (extra ``plots``), into PNG or SVG."""

from __future__ import annotations

import statistics
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vllm_core.bench.compare import Judgement
from vllm_core.bench.results import STAGES, Result, Start, stage_percentile
from vllm_core.errors import ConfigError

_UNITS = {"out_per_s": "tokens/s", "in_per_s": "prompt tokens/s", "seconds": "s"}
_GOOD, _BAD, _PLAIN, _SECOND = "#2a7f62", "#b3423a", "#3b6ea5", "#c9a227"


def require() -> None:
    """Raises ConfigError where matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise ConfigError(
            "Plots need matplotlib",
            on="--out",
            found="it is not installed",
            expected="the extra `plots`",
            fix='pip install "matplotlib>=3.9", or write .json, .md or .csv',
        )


def draw_result(result: Result, path: Path) -> None:
    """Rates and stages by workload, or starts by stage."""
    figure = _figure(result)
    _save(figure, path)


def _figure(result: Result) -> Any:
    from matplotlib.figure import Figure

    title = f"{result.model.name}, {result.plan.device.name}, {result.plan.platform}, {result.plan.dtype}"
    if result.startup is not None:
        figure = Figure(figsize=(9, 6), layout="constrained")
        above, below = figure.subplots(2, 1)
        _draw_starts(above, {"cold": result.startup.cold, "cached": _middle(result.startup.cached)})
        for label, one in (("cold", result.startup.cold), ("cached", _middle(result.startup.cached))):
            below.plot(*zip(*one.tokens, strict=True), label=f"first run, {label}")
        below.plot(*zip(*result.startup.cached[-1].steady, strict=True), label="later run", linestyle=":")
        below.set(xlabel="seconds since requests are accepted", ylabel="tokens")
        below.legend()
    else:
        count = max(1, len(result.rows))
        figure = Figure(figsize=(max(4.0, 2.6 * count), 6), layout="constrained")
        axes = figure.subplots(2, count, squeeze=False)
        for number, row in enumerate(result.rows):
            _draw_rate(axes[0][number], row)
            _draw_stages(axes[1][number], row)
    figure.suptitle(title, fontsize=10)
    return figure


def _draw_rate(axes: Any, row: Any) -> None:
    """Median of the counted runs, their range, and the first run beside it."""
    values = [getattr(run, row.workload.rate) for run in row.runs]
    median = statistics.median(values)
    axes.bar(["first", "median"], [getattr(row.first, row.workload.rate), median], color=[_SECOND, _PLAIN])
    axes.errorbar(["median"], [median], yerr=[[median - min(values)], [max(values) - median]], color="black", capsize=4)
    axes.set_title(row.workload.name, fontsize=9)
    axes.set_ylabel(_UNITS[row.workload.rate])


def _draw_stages(axes: Any, row: Any) -> None:
    places = range(len(STAGES))
    for shift, share, color in ((-0.2, 50, _PLAIN), (0.2, 99, _SECOND)):
        heights = [1000 * stage_percentile(row.runs, stage, share) for stage in STAGES]
        axes.bar([place + shift for place in places], heights, width=0.4, color=color, label=f"p{share}")
    axes.set_xticks(list(places), STAGES, fontsize=8)
    axes.set_ylabel("ms")
    axes.legend(fontsize=7)


def _draw_starts(axes: Any, starts: dict[str, Start]) -> None:
    left = dict.fromkeys(starts, 0.0)
    for stage in dict.fromkeys(name for one in starts.values() for name in one.stages):
        widths = [one.stages.get(stage, 0.0) for one in starts.values()]
        axes.barh(list(starts), widths, left=list(left.values()), label=stage)
        left = {name: left[name] + width for name, width in zip(starts, widths, strict=True)}
    axes.set_xlabel("seconds until requests are accepted")
    axes.legend(fontsize=7, ncols=4)


def _middle(starts: list[Start]) -> Start:
    return sorted(starts, key=lambda one: one.accepts_s)[len(starts) // 2]


def draw_judgement(found: Judgement, path: Path) -> None:
    """How far each measured criterion is from its limit."""
    from matplotlib.figure import Figure

    measured = [one for one in found.criteria if one.slack is not None]
    figure = Figure(figsize=(8, 1 + 0.3 * len(measured)), layout="constrained")
    axes = figure.subplots()
    names = [f"{one.name}{f', {one.workload}' if one.workload else ''}: {one.change}" for one in measured]
    slack = [100 * (one.slack or 0.0) for one in measured]
    axes.barh(names, slack, color=[_BAD if one.verdict == "fail" else _GOOD for one in measured])
    axes.axvline(0, color="black", linewidth=1)
    axes.invert_yaxis()
    axes.set_xlabel("percent from the limit; left of 0 fails")
    axes.set_title("B against A", fontsize=10)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
