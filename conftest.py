"""Every test draws the same numbers wherever it runs: torch seeds its generator anew in every process. And in CI: the time."""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path

import pytest

SERVER = "core/tests/serve"
SLOW_FILES = 15


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """The host's generator alone, and only where a test module brought torch in: some tests hold that nothing does."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.manual_seed(0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Where VLLM_CI_STAGES names a file of `.ci/run`: seconds a stage, a distribution's share of those of tests, slow files.

    Tests of several workers run side by side: their seconds are divided by the number of workers.
    """
    stages = os.environ.get("VLLM_CI_STAGES")
    if not stages:
        return
    workers = terminalreporter.config.getoption("numprocesses", None) or 1
    shares, files = Counter[str](), Counter[str]()
    for reports in terminalreporter.stats.values():
        for one in reports:
            if isinstance(one, pytest.TestReport):
                shares[share_of(one.nodeid)] += one.duration / workers
                files[one.nodeid.partition("::")[0]] += one.duration / workers
    terminalreporter.section("seconds")
    terminalreporter.write(Path(stages).read_text(encoding="utf-8"))
    for name, seconds in (*shares.most_common(), *files.most_common(SLOW_FILES)):
        terminalreporter.write_line(f"{seconds:.0f} tests: {name}")


def share_of(nodeid: str) -> str:
    """Core's server apart from core, a plugin by its name, all else by its first folder."""
    parts = nodeid.split("/")
    return SERVER if nodeid.startswith(f"{SERVER}/") else parts[parts[0] == "plugins"]
