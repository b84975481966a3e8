"""The suites of one pytest process.

Rows travel with pytest's own reports, so that they come together in one process whether or not pytest-xdist spreads the items.
That process knows from the must-pass lists what had to come: whatever is missing, be it deselected, stopped by ``--maxfail``
or lost with a worker, is NOT_RUN, the run INCOMPLETE, and the exit status 3.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import msgspec
import pytest

from vllm_conformance.case import Case
from vllm_conformance.declaration import Conformance
from vllm_conformance.options import RunOptions
from vllm_conformance.pool import MAX_LOST, run_case
from vllm_conformance.protocol import Description, Setup
from vllm_conformance.pytest_plugin import COMMAND_LINE, PROPERTY
from vllm_conformance.report import Report, write_report
from vllm_conformance.run import chosen, describe, make_report
from vllm_conformance.verdict import EXIT_STATUS, GOOD, JUDGED_LEVELS, Row, judge
from vllm_conformance.worker import Worker, environment
from vllm_core.errors import VLLMCoreError


class Place(msgspec.Struct, frozen=True):
    """Which case of which suite an item is."""

    suite: str
    case: Case


class Told(msgspec.Struct, frozen=True):
    """What the process that makes the report must know of a suite that another one collected."""

    key: str
    declaration: dict[str, Any]
    description: Description


class Suite:
    """One declaration, what its platform is, and the child in which this process runs its cases."""

    def __init__(self, key: str, declaration: Conformance, description: Description | None = None) -> None:
        self.key, self.declaration = key, declaration
        self.options: RunOptions = declaration.options()
        self.description = describe(self.options) if description is None else description
        self._worker: Worker | None = None
        self._lost = 0

    @property
    def cases(self) -> tuple[Case, ...]:
        """What has to be run."""
        return chosen(self.options, self.description)

    def run(self, case: Case) -> Row | None:
        """Run one, unless too many children have been lost."""
        if self._lost >= MAX_LOST:
            return None
        if self._worker is None:
            key = f"{self.description.distribution}:{self.description.entry_point}"
            setup = Setup(platform=key, devices=self.description.devices, options=self.options.options)
            self._worker = Worker(setup, environment(os.environ, 1), self.options.limits_s["large"])
        row = run_case(self._worker, case, self.options.limits_s)
        self._lost += row.outcome in ("CRASH", "HANG")
        return row

    def close(self) -> None:
        """End the child."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def told(self) -> Told:
        """For the process that makes the report."""
        return Told(self.key, msgspec.to_builtins(self.declaration, enc_hook=str), self.description)

    @classmethod
    def from_told(cls, told: Told) -> Suite:
        """The suite that another process collected."""
        declaration = msgspec.convert(told.declaration, Conformance, dec_hook=lambda kind, value: kind(value))
        return cls(told.key, declaration, told.description)


class SuiteCollector(pytest.Collector):
    """Collects the cases of a declaration."""

    def __init__(self, *, declaration: Conformance, session_state: SuiteSession, **keywords: Any) -> None:
        super().__init__(**keywords)
        self._declaration, self._state = declaration, session_state

    def collect(self) -> list[CaseItem]:
        """Asks a child process what there is."""
        try:
            suite = Suite(self.nodeid, self._declaration)
        except VLLMCoreError as error:
            raise self.CollectError(str(error)) from error
        return self._state.items(self, suite)


class CaseFailedError(Exception):
    """A bad row."""


class CaseItem(pytest.Item):
    """One case."""

    def __init__(self, *, suite: Suite, case: Case, **keywords: Any) -> None:
        super().__init__(**keywords)
        self._suite, self.case = suite, case
        self._tell(Place(suite.key, case))

    def _tell(self, message: Place | Row) -> None:
        self.user_properties.append((PROPERTY, msgspec.json.encode(message).decode()))

    def runtest(self) -> None:
        """Run it in the suite's child. Raises CaseFailedError where its row is bad."""
        row = self._suite.run(self.case)
        if row is None:
            raise CaseFailedError(f"NOT_RUN: given up after {MAX_LOST} crashes and hangs")
        self._tell(row)
        (judged,) = judge([row], self._suite.options.waivers, today=datetime.now(timezone.utc).date(), level=5).rows
        if judged.verdict not in GOOD and judged.level in JUDGED_LEVELS:
            raise CaseFailedError(f"{judged.verdict}: {judged.detail}")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """What happened, and not where in this file."""
        if isinstance(excinfo.value, CaseFailedError):
            return f"{self.case.id}\n{excinfo.value}"
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int, str]:
        """Its id."""
        return self.path, 0, self.case.id


class SuiteSession:
    """The suites that this process has met; in the one that the user started, also the rows that came in."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._suites: dict[str, Suite] = {}
        self._rows: dict[str, dict[str, Row]] = {}
        self._reports: list[tuple[Report, Path]] = []
        self._started = datetime.now(timezone.utc)

    def collector(self, parent: pytest.Collector, name: str, declaration: Conformance) -> SuiteCollector:
        """The collector of a declaration."""
        made: SuiteCollector = SuiteCollector.from_parent(parent, name=name, declaration=declaration, session_state=self)
        return made

    def items(self, parent: pytest.Collector | pytest.Session, suite: Suite) -> list[CaseItem]:
        """The items of a suite."""
        self._suites[suite.key] = suite
        return [CaseItem.from_parent(parent, name=case.id, suite=suite, case=case) for case in suite.cases]

    def asked_for(self, session: pytest.Session) -> list[CaseItem]:
        """The items that the command line asks for."""
        option = self._config.getoption
        declaration = Conformance(
            platform=option(COMMAND_LINE),
            level=option("--vllm-level"),
            device=option("--vllm-device"),
            subset=option("--vllm-subset"),
            waivers=option("--vllm-waivers"),
            out=option("--vllm-out"),
        )
        made: SuiteCollector = SuiteCollector.from_parent(
            session, name=COMMAND_LINE, nodeid=COMMAND_LINE, declaration=declaration, session_state=self
        )
        try:
            return made.collect()
        except made.CollectError as error:
            raise pytest.UsageError(str(error)) from error

    def take(self, report: pytest.TestReport, values: Sequence[str]) -> None:
        """Take in what an item's report carries: its place, and the row where it has been run."""
        place = msgspec.json.decode(values[0], type=Place)
        rows = self._rows.setdefault(place.suite, {})
        if len(values) > 1:
            rows[place.case.id] = msgspec.json.decode(values[-1], type=Row)
        elif report.when == "setup" and report.skipped:
            rows[place.case.id] = _skipped(place.case)

    def hear(self, told: str) -> None:
        """What a worker of pytest-xdist had collected."""
        for one in msgspec.json.decode(told, type=list[Told]):
            if one.key not in self._suites:
                self._suites[one.key] = Suite.from_told(one)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Judge and write the reports. The exit status becomes 3 where a run is incomplete."""
        for suite in self._suites.values():
            suite.close()
        output = getattr(self._config, "workeroutput", None)
        if output is not None:
            output[PROPERTY] = msgspec.json.encode([one.told() for one in self._suites.values()]).decode()
        elif not self._config.option.collectonly:
            self._conclude(session)

    def _conclude(self, session: pytest.Session) -> None:
        self._reports = list(self._made())
        for report, out in self._reports:
            write_report(report, out / "conformance.json")
        results = {report.result for report, _ in self._reports}
        # Rows of a suite of which nobody told: every worker that had collected it was lost.
        if "INCOMPLETE" in results or self._rows.keys() - self._suites.keys():
            session.exitstatus = EXIT_STATUS["INCOMPLETE"]
        elif session.exitstatus == pytest.ExitCode.OK and "NOT_CONFORMANT" in results:
            session.exitstatus = EXIT_STATUS["NOT_CONFORMANT"]

    def _made(self) -> Iterator[tuple[Report, Path]]:
        seconds = (datetime.now(timezone.utc) - self._started).total_seconds()
        for key, suite in self._suites.items():
            rows = list(self._rows.get(key, {}).values())
            yield (
                make_report(suite.options, suite.description, rows, started=self._started, seconds=seconds),
                suite.declaration.out,
            )

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """The result of each suite."""
        from vllm_conformance.table import summary

        for report, out in self._reports:
            terminalreporter.section("vllm conformance")
            for line in (*summary(report), f"written to {out / 'conformance.json'}"):
                terminalreporter.write_line(line)


def _skipped(case: Case) -> Row:
    """A case that somebody's mark or fixture skipped."""
    return Row(
        id=case.id,
        level=case.level,
        group=case.group,
        size=case.size,
        outcome="ILLEGAL_SKIP",
        verdict="ILLEGAL_SKIP",
        detail="pytest skipped it",
    )
