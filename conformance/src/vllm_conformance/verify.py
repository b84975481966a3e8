"""What a report claims, recomputed from its rows; and some of its rows, run again.

Recomputing catches accidents: an edited verdict, a list of another version, a tree that nobody else has. Who means to
deceive can write rows that are consistent; only running them again (`rerun`), on hardware of one's own, tells.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal, TypeAlias

from vllm_conformance.lists import FOLDER, MustPass, read_lists
from vllm_conformance.options import RunOptions
from vllm_conformance.pool import run_cases
from vllm_conformance.report import Report, digest_of
from vllm_conformance.run import describe, make_report, required_ids
from vllm_conformance.verdict import EXIT_STATUS, JUDGED_LEVELS, Judgement, Result, Row, judge
from vllm_conformance.version import __version__

Kind = Literal["TAMPERED", "DIRTY", "OTHER_VERSION", "OTHER_RESULT"]
VerifiedResult: TypeAlias = Result | Literal["TAMPERED", "REFUSED"]
VERIFY_STATUS: Mapping[str, int] = {**EXIT_STATUS, "TAMPERED": 1, "REFUSED": 1}


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a report cannot be believed as it is. `OTHER_RESULT`: a row came out differently when it was run again."""

    kind: Kind
    text: str


@dataclass(frozen=True, slots=True)
class Verification:
    """What a report comes to."""

    result: VerifiedResult
    reached: int
    problems: tuple[Problem, ...]
    repeated: tuple[str, ...] = ()


def verify(report: Report, *, lists: Path = FOLDER) -> Verification:
    """Recompute the result. It stands only where nothing speaks against the report."""
    judgement = judge(
        report.rows,
        [one.waiver for one in report.waivers],
        today=datetime.fromisoformat(report.started).date(),
        level=report.level,
        subset=report.subset,
    )
    return _concluded(judgement, tuple(_problems(report, judgement, read_lists(lists))))


def _concluded(judgement: Judgement, problems: tuple[Problem, ...], repeated: tuple[str, ...] = ()) -> Verification:
    kinds = {problem.kind for problem in problems}
    result: VerifiedResult = judgement.result
    if kinds & {"TAMPERED", "OTHER_RESULT"}:
        result = "TAMPERED"
    elif kinds:
        result = "REFUSED"
    return Verification(result, judgement.reached if not kinds else -1, problems, repeated)


def _problems(report: Report, judgement: Judgement, lists: Mapping[int, MustPass]) -> Iterator[Problem]:
    if report.digest != digest_of(report):
        yield Problem("TAMPERED", "its digest is not that of its contents")
    hashes = {f"L{level}": items.sha256 for level, items in lists.items()}
    if report.versions.suite != __version__:
        yield Problem("OTHER_VERSION", f"written by vllm-conformance {report.versions.suite}; this is {__version__}")
    elif report.lists != hashes:
        wrong = sorted(name for name in hashes.keys() | report.lists.keys() if hashes.get(name) != report.lists.get(name))
        yield Problem("TAMPERED", f"must-pass lists are not those of {__version__}: {', '.join(wrong)}")
    else:
        yield from _unlisted(report, lists)
    for name in report.dirty:
        yield Problem("DIRTY", f"{name} was neither a clean checkout nor an unchanged wheel")
    yield from _misjudged(report, judgement)


def _unlisted(report: Report, lists: Mapping[int, MustPass]) -> Iterator[Problem]:
    """Rows that are missing, there twice, or asked for by no list."""
    required = required_ids(report, lists, report.level, report.subset)
    counts = Counter(row.id for row in report.rows)
    known = required | {f"L{level}/*" for level in range(report.level + 1)}
    for what, ids in (
        ("required and missing", required - counts.keys()),
        ("there twice", {one for one, count in counts.items() if count > 1}),
        ("asked for by no list", counts.keys() - known),
    ):
        if ids:
            yield Problem("TAMPERED", f"{len(ids)} rows are {what}, such as {min(ids)}")


def _misjudged(report: Report, judgement: Judgement) -> Iterator[Problem]:
    wrong = [old for old, new in zip(report.rows, judgement.rows, strict=True) if old.verdict != new.verdict]
    if wrong:
        yield Problem("TAMPERED", f"{len(wrong)} rows have a verdict that does not follow, such as {wrong[0].id}")
    if report.waivers != judgement.waivers:
        yield Problem("TAMPERED", "waivers have verdicts that do not follow")
    if (report.result, report.reached) != (judgement.result, judgement.reached):
        found = f"it says {report.result}, level {report.reached}"
        yield Problem("TAMPERED", f"{found}; its rows say {judgement.result}, level {judgement.reached}")


def rerun(report: Report, count: int, *, seed: int | None = None, options: RunOptions | None = None) -> Verification:
    """Verify, then run ``count`` random rows again here and compare.

    Raises PlatformError where the platform is not installed here.
    """
    first = verify(report, lists=options.lists if options else FOLDER)
    base = options or RunOptions(platform=f"{report.platform.distribution}:{report.platform.entry_point}")
    options = RunOptions(
        platform=base.platform, options=report.options, limits_s=base.limits_s, cases=base.cases, lists=base.lists
    )
    ran = [row for row in report.rows if row.level in JUDGED_LEVELS and row.outcome != "NOT_RUN"]
    picked = random.Random(seed).sample(ran, min(count, len(ran)))
    wanted = {row.id: row for row in picked}
    description = describe(options)
    cases = [case for case in description.cases if case.id in wanted]
    now = datetime.fromisoformat(report.started)
    here = make_report(options, description, run_cases(options, description, cases), started=now, seconds=0.0)
    problems = (*first.problems, *_differences(report, here, wanted))
    kinds = {problem.kind for problem in problems}
    result: VerifiedResult = first.result
    if "OTHER_RESULT" in kinds:
        result = "TAMPERED"
    elif kinds - {problem.kind for problem in first.problems} and first.result not in ("TAMPERED", "REFUSED"):
        result = "REFUSED"
    return Verification(result, first.reached if not kinds else -1, problems, tuple(wanted))


def _differences(report: Report, here: Report, wanted: Mapping[str, Row]) -> Iterator[Problem]:
    theirs, ours = {one.name: one for one in report.sources}, {one.name: one for one in here.sources}
    other = (
        sorted(name for name in theirs if theirs[name].digest != ours[name].digest) if theirs.keys() == ours.keys() else ["all"]
    )
    if other:
        yield Problem("OTHER_VERSION", f"the code installed here is not that of the report: {', '.join(other)}")
        return
    if report.claims != here.claims:
        yield Problem("OTHER_RESULT", "the plugin claims something else here")
    found = {row.id: row for row in here.rows}
    exact = _same_machine(report, here)
    for id_, row in wanted.items():
        again = found.get(id_)
        if again is None or again.outcome == "NOT_RUN":
            yield Problem("OTHER_RESULT", f"{id_}: could not be run here")
        elif again.outcome != row.outcome:
            yield Problem("OTHER_RESULT", f"{id_}: {row.outcome} in the report, {again.outcome} here: {again.detail}")
        elif exact and row.digest and again.digest and row.digest != again.digest:
            yield Problem("OTHER_RESULT", f"{id_}: another output than in the report")


def _same_machine(report: Report, here: Report) -> bool:
    """Whether outputs should be equal bit for bit: the same device, driver and torch."""

    def facts(one: Report) -> Sequence[object]:
        device = one.devices[0] if one.devices else None
        return (
            device and (device.name, device.architecture, device.driver_version, device.runtime_version)
        ), one.versions.torch

    return facts(report) == facts(here)
