"""The suite as items of pytest, in a pytest of its own: what is left out, lost or skipped never ends with 0."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from vllm_conformance.report import read_report

pytest.importorskip("vllm_cpu")

WIRING = """
from pathlib import Path
from vllm_conformance import Conformance

conformance = Conformance(platform={platform!r}, level={level})
"""


WITHOUT = ("-p", "no:schemathesis", "-p", "no:hypothesispytest")
"""What others have brought to this environment takes longer to load than these tests take."""


@pytest.fixture
def project(tmp_path, site):
    """A plugin's tests: write files, run pytest there, and get the exit status, the output and the report."""
    folder = tmp_path / "project"
    folder.mkdir()

    def go(*arguments, platform="cpu", level=0, wiring=True, **files):
        if wiring:
            (folder / "test_conformance.py").write_text(WIRING.format(platform=platform, level=level))
        for name, text in files.items():
            (folder / f"{name}.py").write_text(text)
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *WITHOUT, *arguments],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(site)},
            capture_output=True,
            text=True,
            check=False,
            timeout=250,
        )
        path = folder / "conformance-report" / "conformance.json"
        return done.returncode, done.stdout + done.stderr, read_report(path) if path.exists() else None

    return go


def verdicts(report):
    return [row.verdict for row in report.rows]


def test_three_lines_of_wiring_run_the_suite(project):
    status, output, report = project()
    assert (status, report.result) == (0, "CONFORMANT"), output
    assert "CONFORMANT: vllm-cpu" in output
    assert f"{len(report.rows)} passed" in output


def test_the_command_line_runs_it_without_a_file(project):
    status, output, report = project("--vllm-platform", "vllm-cpu", "--vllm-level", "0", wiring=False)
    assert (status, report.result) == (0, "CONFORMANT"), output


def test_a_choice_by_keyword_is_incomplete(project):
    status, output, report = project("-k", "manifest")
    assert (status, report.result) == (3, "INCOMPLETE"), output
    assert verdicts(report).count("PASS") == 1
    assert "NOT_RUN" in verdicts(report)


def test_a_choice_that_leaves_nothing_is_incomplete(project):
    assert project("-k", "nothing_is_called_so")[0] == 3


def test_a_bad_row_fails_its_item_and_the_run(project, install):
    install()
    status, output, report = project(platform="broken")
    assert (status, report.result) == (1, "NOT_CONFORMANT"), output
    assert "FAIL: versions" in output


def test_maxfail_is_incomplete(project, install):
    install()
    status, output, report = project("--maxfail", "1", platform="broken")
    assert (status, report.result) == (3, "INCOMPLETE"), output
    assert verdicts(report).count("FAIL") == 1


def test_a_missing_device_is_incomplete(project, install):
    install("no device")
    status, output, report = project(platform="broken", level=1)
    assert (status, report.result) == (3, "INCOMPLETE"), output
    assert [row.id for row in report.rows if row.verdict == "NOT_RUN"] == ["L1/*"]


SKIPS = """
import pytest

def pytest_collection_modifyitems(items):
    for item in items:
        if "manifest" in item.name:
            item.add_marker(pytest.mark.skip(reason="slow"))
        if "probe" in item.name:
            item.add_marker(pytest.mark.xfail(reason="known"))
"""


def test_a_skip_by_somebody_elses_mark_is_illegal(project):
    status, output, report = project(conftest=SKIPS)
    assert (status, report.result) == (1, "NOT_CONFORMANT"), output
    assert {row.id: row.verdict for row in report.rows if row.verdict != "PASS"} == {"L0/manifest": "ILLEGAL_SKIP"}


DIES = """
import os

def pytest_runtest_setup(item):
    if "probe" in item.name:
        os._exit(1)
"""


def test_rows_of_two_workers_come_together(project):
    status, output, report = project("-n", "2")
    assert (status, report.result) == (0, "CONFORMANT"), output


def test_a_lost_worker_is_incomplete(project):
    status, output, report = project("-n", "2", "--max-worker-restart", "0", conftest=DIES)
    assert (status, report.result) == (3, "INCOMPLETE"), output
    assert {row.id for row in report.rows if row.verdict == "NOT_RUN"} >= {"L0/probe"}


def test_other_tests_are_left_alone(project):
    status, output, report = project(wiring=False, test_other="def test_it():\n    assert True\n")
    assert (status, report) == (0, None), output
    assert "conformance" not in output


def test_a_platform_that_is_not_installed_is_an_error_of_collection(project):
    status, output, _ = project(platform="nowhere")
    assert status == 2
    assert "No such platform: nowhere" in output
    status, output, _ = project("--vllm-platform", "nowhere", wiring=False, test_conformance="")
    assert status == 4
    assert "No such platform: nowhere" in output


LOADED = """
import sys

def test_nothing_of_the_suite_is_loaded():
    assert [name for name in sys.modules if name.startswith("vllm_")] == ["vllm_conformance", "vllm_conformance.pytest_plugin"]
"""


def test_a_pytest_that_does_not_use_it_loads_next_to_nothing(project):
    status, output, _ = project(wiring=False, test_loaded=LOADED)
    assert status == 0, output
