"""Runs cases in child processes, level by level, and gives each its row."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from vllm_conformance.case import Case, Evidence, Size
from vllm_conformance.options import RunOptions
from vllm_conformance.protocol import MAX_DETAIL_CHARS, Description, Done, Setup, Task
from vllm_conformance.verdict import GOOD, Row
from vllm_conformance.worker import Lost, Worker, environment

MAX_LOST = 10
"""Children lost in a run before it is given up: a device that keeps dying would take hours, a time limit at a time."""
ALONE = frozenset({1, 5})
"""Levels whose cases want the device to themselves: its memory is measured, or its speed. Others say so: a param ``alone``."""


Progress = Callable[[Row], None]


def selected(options: RunOptions, case: Case) -> bool:
    """Whether somebody's choice leaves the case in."""
    return not options.only or any(fnmatchcase(case.id, pattern) for pattern in options.only)


def run_cases(
    options: RunOptions,
    description: Description,
    cases: Sequence[Case],
    progress: Progress = lambda row: None,
    environ: Mapping[str, str] = os.environ,
) -> list[Row]:
    """Run cases, level by level; the rows of all of them, in their order."""
    pool = _Pool(options, description, progress, environ)
    try:
        for level in sorted({case.level for case in cases}):
            members = [case for case in cases if case.level == level and selected(options, case)]
            alone = [case for case in members if level in ALONE or case.params.get("alone")]
            pool.run([case for case in members if case not in alone], options.jobs)
            pool.run(alone, 1)
    finally:
        pool.close()
    reason = pool.stopped or "left out by choice"
    return [pool.rows.get(case.id) or row_of(case, Done(evidence=_not_run(reason), not_run=True), 0.0) for case in cases]


class _Pool:
    """Some workers, each fed by a thread while a level runs."""

    def __init__(self, options: RunOptions, description: Description, progress: Progress, environ: Mapping[str, str]) -> None:
        self.rows: dict[str, Row] = {}
        self.stopped = ""
        self._options, self._progress = options, progress
        key = f"{description.distribution}:{description.entry_point}"
        setup = Setup(platform=key, devices=description.devices, options=options.options)
        environ = environment(environ, options.jobs)
        self._workers = [Worker(setup, environ, options.limits_s["large"]) for _ in range(options.jobs)]
        self._lock = threading.Lock()
        self._lost = self._bad = 0

    def run(self, cases: Sequence[Case], jobs: int) -> None:
        """Run them, and wait."""
        left, errors = deque(cases), list[BaseException]()
        threads = [threading.Thread(target=self._feed, args=(one, left, errors)) for one in self._workers[:jobs]]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException:  # Ctrl-C: the children are in groups of their own and do not hear it
            left.clear()
            for worker in self._workers:
                worker.interrupt()
            for thread in threads:
                thread.join()
            raise
        if errors:
            raise errors[0]

    def close(self) -> None:
        """End the children."""
        for worker in self._workers:
            worker.close()

    def _feed(self, worker: Worker, left: deque[Case], errors: list[BaseException]) -> None:
        try:
            while left and not self.stopped:
                try:
                    case = left.popleft()
                except IndexError:  # another thread took the last one
                    break
                self._note(run_case(worker, case, self._options.limits_s))
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
            errors.append(error)
            left.clear()

    def _note(self, row: Row) -> None:
        with self._lock:
            self.rows[row.id] = row
            self._lost += row.outcome in ("CRASH", "HANG")
            self._bad += row.outcome not in GOOD
            if self._lost >= MAX_LOST:
                self.stopped = f"given up after {self._lost} crashes and hangs"
            elif self._options.maxfail is not None and self._bad >= self._options.maxfail:
                self.stopped = f"stopped after {self._bad} bad rows"
            self._progress(row)


def run_case(worker: Worker, case: Case, limits_s: Mapping[Size, float]) -> Row:
    """Run one case; a child that dies of it is replaced for the next one."""
    began = time.monotonic()
    answer = worker.ask(Task(case=case), limits_s[case.size])
    assert isinstance(answer, (Done, Lost)), "a child answers Task with Done"
    return row_of(case, answer, time.monotonic() - began)


def row_of(case: Case, answer: Done | Lost, seconds: float) -> Row:
    """A row without judgement: its verdict is its outcome."""
    plain = {"id": case.id, "level": case.level, "group": case.group, "size": case.size, "seconds": round(seconds, 3)}
    if isinstance(answer, Lost):
        detail = answer.detail[:MAX_DETAIL_CHARS]
        return msgspec.convert({**plain, "outcome": answer.outcome, "verdict": answer.outcome, "detail": detail}, Row)
    evidence: dict[str, Any] = msgspec.to_builtins(answer.evidence)
    outcome = "NOT_RUN" if answer.not_run else evidence["outcome"]
    return msgspec.convert({**plain, **evidence, "outcome": outcome, "verdict": outcome}, Row)


def _not_run(reason: str) -> Evidence:
    return Evidence(outcome="FAIL", detail=reason)
