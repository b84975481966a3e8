"""A run of the suite: describe the platform, run its cases in child processes, judge, and make the report."""

from __future__ import annotations

import os
import platform as host_platform
import time
from collections.abc import Mapping, Sequence
from datetime import date, datetime, timezone
from fnmatch import fnmatchcase
from typing import Any, Protocol

import msgspec

from vllm_conformance.case import Case
from vllm_conformance.describe import unknown_cases
from vllm_conformance.lists import MustPass, conditions_of, read_lists
from vllm_conformance.options import RunOptions
from vllm_conformance.pool import Progress, run_cases
from vllm_conformance.protocol import MAX_DETAIL_CHARS, Describe, Description, Setup
from vllm_conformance.report import FORMAT, Platform, Report, Versions, sealed
from vllm_conformance.sources import host, source_of
from vllm_conformance.subject import ABSENT, found_platform
from vllm_conformance.verdict import Row, judge
from vllm_conformance.version import __version__
from vllm_conformance.worker import Lost, Worker, environment
from vllm_core.api import DeviceFacts
from vllm_core.errors import ConfigError, closest
from vllm_core.version import __version__ as core_version


def run(options: RunOptions, *, progress: Progress = lambda row: None, environ: Mapping[str, str] = os.environ) -> Report:
    """Run the suite. Raises PlatformError for a platform that is not installed, ConfigError for broken lists and patterns."""
    started, clock = datetime.now(timezone.utc), time.monotonic()
    description = describe(options, environ)
    cases = chosen(options, description)
    _check_patterns(options, cases)
    rows = run_cases(options, description, cases, progress, environ)
    return make_report(options, description, rows, started=started, seconds=time.monotonic() - clock)


def _check_patterns(options: RunOptions, cases: Sequence[Case]) -> None:
    for pattern in options.only:
        if not any(fnmatchcase(case.id, pattern) for case in cases):
            starts = sorted({case.id.rpartition("/")[0] for case in cases})
            near = closest(pattern.rpartition("/")[0] or pattern, starts)
            raise ConfigError(
                "No case has such an id",
                on=pattern,
                found=f"{len(cases)} cases up to level {options.level}, all with other ids",
                expected="a pattern of whole ids, like L2/rms_norm/*",
                fix=f"did you mean '{near}/*'?" if near else "put * before and after a part of an id",
            )


def describe(options: RunOptions, environ: Mapping[str, str] = os.environ) -> Description:
    """Ask a child process what the platform is. One whose plugin crashes or hangs can be tested at level 0 alone."""
    found = found_platform(options.platform)
    worker = Worker(Setup(platform=found.key, options=options.options), environment(environ, 1), options.limits_s["large"])
    try:
        answer = worker.ask(Describe(device=options.device, cases=options.cases), options.limits_s["medium"])
    finally:
        worker.close()
    if isinstance(answer, Description):
        return answer
    assert isinstance(answer, Lost), "a child answers Describe with a Description"
    return Description(
        platform=found.platform,
        distribution=found.distribution,
        distribution_version=found.version,
        entry_point=found.entry_point,
        problem=f"{answer.outcome}: {answer.detail}",
        cases=unknown_cases(options.cases),
    )


class Described(Protocol):
    """What the must-pass lists go by: a `Description`, or a report."""

    @property
    def claims(self) -> Mapping[str, Mapping[str, Any]]:
        """Claims as plain data."""

    @property
    def providers(self) -> Mapping[str, tuple[str, ...]]:
        """Who serves which op."""

    @property
    def devices(self) -> tuple[DeviceFacts, ...]:
        """What it was run on; without any, nothing above level 0 can be asked."""


def required_ids(described: Described, lists: Mapping[int, MustPass], level: int, subset: str | None) -> frozenset[str]:
    """What the must-pass lists ask of this platform; of one without devices, level 0."""
    absent = {name: one["kind"] in ABSENT for name, one in described.claims.items()}
    conditions = conditions_of(absent, described.providers)
    levels = [items for number, items in lists.items() if number <= (level if described.devices else 0)]
    return frozenset(one for items in levels for one in items.required(conditions, subset))


def chosen(options: RunOptions, description: Description) -> tuple[Case, ...]:
    """The cases to run, and those that the lists ask for."""
    required = required_ids(description, read_lists(options.lists), options.level, options.subset)
    return tuple(
        case for case in description.cases if case.level <= options.level and (options.subset is None or case.id in required)
    )


def make_report(
    options: RunOptions,
    description: Description,
    rows: Sequence[Row],
    *,
    started: datetime,
    seconds: float,
    today: date | None = None,
) -> Report:
    """Judge the rows, add those that are required and not there, and put the report together."""
    judgement = judge(
        [*rows, *_missing(options, description, rows)],
        options.waivers,
        today=started.date() if today is None else today,
        level=options.level,
        subset=options.subset,
    )
    device = description.devices[0] if description.devices else None
    report = Report(
        format=FORMAT,
        result=judgement.result,
        level=options.level,
        reached=judgement.reached,
        subset=options.subset,
        started=started.isoformat(timespec="seconds"),
        seconds=round(seconds, 1),
        platform=Platform(
            name=description.platform,
            distribution=description.distribution,
            entry_point=description.entry_point,
            vendor=description.vendor,
            support_level=description.support_level,
            problem=description.problem,
            companions=description.companions or msgspec.UNSET,
        ),
        devices=description.devices,
        versions=Versions(
            core=core_version,
            suite=__version__,
            plugin=description.distribution_version,
            api=description.api_version,
            torch=description.torch_version,
            python=host_platform.python_version(),
            driver=device.driver_version if device else "",
            runtime=device.runtime_version if device else "",
        ),
        host=host(),
        sources=(
            source_of("vllm-core", "vllm_core"),
            source_of("vllm-conformance", "vllm_conformance"),
            source_of(description.distribution, found_platform(f"{description.distribution}:{description.entry_point}").value),
        ),
        lists={f"L{level}": items.sha256 for level, items in read_lists(options.lists).items()},
        claims=description.claims,
        providers=description.providers,
        plan=description.plan,
        plan_problem=description.plan_problem,
        options=dict(options.options),
        rows=judgement.rows,
        waivers=judgement.waivers,
    )
    return sealed(report)


def _missing(options: RunOptions, description: Description, rows: Sequence[Row]) -> list[Row]:
    """Rows for what was required and never came: ids that nothing generates, and whole levels without a device."""
    there, known = {row.id for row in rows}, {case.id for case in description.cases}
    lost = sorted(required_ids(description, read_lists(options.lists), options.level, options.subset) - there)
    unknown = "the must-pass list asks for it, and nothing generates it"
    missing = [_absent(id_, int(id_[1]), "it was not run" if id_ in known else unknown) for id_ in lost]
    if description.problem:
        missing += [_absent(f"L{level}/*", level, description.problem) for level in range(1, options.level + 1)]
    return missing


def _absent(id_: str, level: int, detail: str) -> Row:
    return Row(
        id=id_,
        level=level,
        group="missing",
        size="small",
        outcome="NOT_RUN",
        verdict="NOT_RUN",
        detail=detail[:MAX_DETAIL_CHARS],
    )
