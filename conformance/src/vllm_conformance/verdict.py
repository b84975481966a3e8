"""Verdicts, and the result that follows from them: the one place that judges, for runs and for `verify` alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from fnmatch import fnmatchcase
from typing import Literal

import msgspec

from vllm_conformance.waivers import Waiver

RowOutcome = Literal["PASS", "REFUSED", "FAIL", "CRASH", "HANG", "UNDERCLAIMED", "BAD_REFUSAL", "ILLEGAL_SKIP", "NOT_RUN"]
"""What happened."""
RowVerdict = Literal[
    "PASS", "REFUSED", "WAIVED", "FAIL", "CRASH", "HANG", "UNDERCLAIMED", "BAD_REFUSAL", "ILLEGAL_SKIP", "NOT_RUN"
]
"""What that means once waivers have been applied."""
WaiverVerdict = Literal["USED", "NOT_JUDGED", "STALE", "EXPIRED", "UNMATCHED"]
Result = Literal["CONFORMANT", "NOT_CONFORMANT", "INCOMPLETE"]

GOOD: frozenset[str] = frozenset({"PASS", "REFUSED", "WAIVED"})
WAIVABLE: frozenset[str] = frozenset({"FAIL", "CRASH", "HANG", "UNDERCLAIMED", "BAD_REFUSAL"})
"""Neither a skip nor a case that did not run can be waived: nobody knows what it would have shown."""
BAD_WAIVERS: frozenset[str] = frozenset({"STALE", "EXPIRED", "UNMATCHED"})
JUDGED_LEVELS = (0, 1, 2, 3, 4)
"""Level 5 is reported and not judged."""
EXIT_STATUS: Mapping[str, int] = {"CONFORMANT": 0, "NOT_CONFORMANT": 1, "INCOMPLETE": 3}
"""2 is an error before anything could be judged."""


class Row(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One case: what happened, and the evidence. `seconds` is wall time; `calls` counts by kind of provider."""

    id: str
    level: int
    group: str
    size: str
    outcome: RowOutcome
    verdict: RowVerdict
    seconds: float = 0.0
    detail: str = ""
    seed: int | None = None
    digest: str = ""
    calls: dict[str, int] = {}
    measured: dict[str, float] = {}
    waiver: str | None = None


class JudgedWaiver(msgspec.Struct, frozen=True, kw_only=True):
    """A waiver and what became of it."""

    id: str
    link: str
    owner: str
    expiry: date
    verdict: WaiverVerdict

    @property
    def waiver(self) -> Waiver:
        """As it was given."""
        return Waiver(id=self.id, link=self.link, owner=self.owner, expiry=self.expiry)


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """Rows and waivers with their verdicts, the result, and the highest level with everything below it good (-1: none)."""

    rows: tuple[Row, ...]
    waivers: tuple[JudgedWaiver, ...]
    result: Result
    reached: int


def judge(rows: Iterable[Row], waivers: Sequence[Waiver], *, today: date, level: int, subset: str | None = None) -> Judgement:
    """Apply waivers to what happened and conclude. The rows' own verdicts are not looked at."""
    valid = [waiver for waiver in waivers if waiver.expiry >= today]
    judged_rows = tuple(_judge_row(row, valid) for row in rows)
    judged_waivers = tuple(_judge_waiver(waiver, judged_rows, today, level, subset) for waiver in waivers)
    return Judgement(
        rows=judged_rows,
        waivers=judged_waivers,
        result=_result(judged_rows, judged_waivers),
        reached=_reached(judged_rows, judged_waivers, level),
    )


def _judge_row(row: Row, waivers: Sequence[Waiver]) -> Row:
    waiver = next((one for one in waivers if fnmatchcase(row.id, one.id)), None) if row.outcome in WAIVABLE else None
    verdict: RowVerdict = row.outcome if waiver is None else "WAIVED"
    return msgspec.structs.replace(row, verdict=verdict, waiver=None if waiver is None else waiver.id)


def _judge_waiver(waiver: Waiver, rows: Sequence[Row], today: date, level: int, subset: str | None) -> JudgedWaiver:
    matched = [row for row in rows if fnmatchcase(row.id, waiver.id)]
    verdict: WaiverVerdict
    if waiver.expiry < today:
        verdict = "EXPIRED"
    elif waiver.level > level or any(row.outcome == "NOT_RUN" for row in matched) or (not matched and subset is not None):
        verdict = "NOT_JUDGED"
    elif not matched:
        verdict = "UNMATCHED"
    elif any(row.outcome in GOOD for row in matched):
        verdict = "STALE"
    else:
        verdict = "USED"
    return JudgedWaiver(id=waiver.id, link=waiver.link, owner=waiver.owner, expiry=waiver.expiry, verdict=verdict)


def _result(rows: Sequence[Row], waivers: Sequence[JudgedWaiver]) -> Result:
    judged = [row for row in rows if row.level in JUDGED_LEVELS]
    if not judged or any(row.outcome == "NOT_RUN" for row in judged):
        return "INCOMPLETE"
    bad = any(row.verdict not in GOOD for row in judged) or any(one.verdict in BAD_WAIVERS for one in waivers)
    return "NOT_CONFORMANT" if bad else "CONFORMANT"


def _reached(rows: Sequence[Row], waivers: Sequence[JudgedWaiver], level: int) -> int:
    """A level of which nothing is asked is no obstacle."""
    reached = -1
    if not rows:
        return reached
    for number in JUDGED_LEVELS[: level + 1]:
        members = [row for row in rows if row.level == number]
        spoilt = any(one.waiver.level == number and one.verdict in BAD_WAIVERS for one in waivers)
        if spoilt or any(row.verdict not in GOOD for row in members):
            break
        reached = number
    return reached
