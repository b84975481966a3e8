"""Children: what they are given, and that none outlives a run, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_conformance.protocol import Describe, Description, Setup
from vllm_conformance.run import run
from vllm_conformance.worker import Lost, Worker, environment
from vllm_core.errors import PlatformError


def children():
    """Process ids of children of the suite that belong to this process."""
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command, status = (path / "cmdline").read_bytes(), (path / "stat").read_text()
        except OSError:
            continue
        if b"vllm_conformance.child" in command and int(status.rpartition(")")[2].split()[1]) == os.getpid():
            found.add(path.name)
    return found


def test_children_do_not_inherit_a_choice_of_platform():
    given = {
        "VLLM_PLATFORM": "cpu",
        "VLLM_CORE_LOG_LEVEL": "DEBUG",
        "VLLM_CORE_CACHE": "/c",
        "VLLM_TOY_MEMORY": "1",
        "HOME": "/h",
        "PYTORCH_ENABLE_MPS_FALLBACK": "1",
    }
    made = environment(given, jobs=2)
    assert {name: made.get(name) for name in given} == {
        "VLLM_PLATFORM": None,
        "VLLM_CORE_LOG_LEVEL": None,
        "VLLM_CORE_CACHE": "/c",
        "VLLM_TOY_MEMORY": "1",
        "HOME": "/h",
        "PYTORCH_ENABLE_MPS_FALLBACK": "0",
    }


@pytest.mark.parametrize("jobs", [1, 2, 1000])
def test_children_share_the_cores(jobs):
    assert int(environment({}, jobs)["OMP_NUM_THREADS"]) == max(1, os.cpu_count() // jobs)
    assert environment({"OMP_NUM_THREADS": "3"}, jobs)["OMP_NUM_THREADS"] == "3"


@pytest.fixture
def worker(install):
    """A worker on a right platform."""
    install()
    made = Worker(Setup(platform="broken"), os.environ, 30.0)
    yield made
    made.close()


def test_a_child_serves_many_requests_and_ends_with_its_worker(worker):
    first, second = (worker.ask(Describe(cases="small_cases"), 30.0) for _ in range(2))
    assert isinstance(first, Description)
    assert first == second
    assert len(children()) == 1
    worker.close()
    assert children() == set()


def test_a_new_child_takes_over_from_a_lost_one(worker):
    worker.ask(Describe(cases="small_cases"), 30.0)
    worker.interrupt()
    assert worker.ask(Describe(cases="small_cases"), 30.0) == Lost("CRASH", "ended by SIGKILL")
    assert isinstance(worker.ask(Describe(cases="small_cases"), 30.0), Description)


def test_what_the_suite_itself_cannot_do_is_an_error_and_no_row(site):
    worker = Worker(Setup(platform="nowhere"), os.environ, 30.0)
    with pytest.raises(PlatformError, match="No such platform: nowhere"):
        worker.ask(Describe(), 30.0)
    assert children() == set()


@pytest.fixture
def interruptible():
    """A job that a shell starts in the background ignores SIGINT, and so would everything here."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_ends_all_children(install, options):
    install("hang")
    rows = []

    def interrupt(row):
        rows.append(row.id)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(options, progress=interrupt)
    assert rows[0] == "L0/loads"
    assert children() == set()


def test_an_error_of_the_parent_is_raised_and_ends_all_children(install, options):
    install()

    def fail(row):
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        run(options, progress=fail)
    assert children() == set()


def test_a_group_that_a_crash_leaves_behind_is_ended_and_no_other_process(install, options):
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        install("waits for a child")
        report = run(options)
        assert {row.verdict for row in report.rows if row.group == "op:add"} == {"CRASH"}
        assert _left("vllm_conformance.child") == set()
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def _left(name):
    """Processes of this run, ended or orphaned, that still have the name."""
    mark = f"PYTEST_CURRENT_TEST={os.environ['PYTEST_CURRENT_TEST']}".encode()
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if name.encode() in (path / "cmdline").read_bytes() and mark in (path / "environ").read_bytes():
                found.add(path.name)
        except OSError:
            continue
    return found
