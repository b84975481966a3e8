from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_triton import ahead

SCRIPT = Path(__file__).with_name("compiled_ahead.py")


def run(cache: Path, *arguments: str, folder: Path | None = None) -> dict:
    environ = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-W", "ignore", str(SCRIPT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environ, cwd=folder, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    return run(tmp_path_factory.mktemp("cache"))


def test_what_a_rehearsal_asks_for_is_compiled_once_and_found_by_the_launch(found):
    assert found["turns"] == [{"asked": 2, "compiled": 2, "failures": []}, {"asked": 2, "compiled": 0, "failures": []}]
    assert found["launched"] == 0
    assert (found["hits"], found["after"]) == ([True, True], 2)


def test_after_a_rehearsal_launches_are_launches_again_and_what_was_compiled_is_not_asked_for(found):
    assert (found["again"], found["hook"]) == (0, False)


def test_what_cannot_be_compiled_ahead_says_why_and_the_launch_still_runs(tmp_path):
    found = run(tmp_path, "no.such.module:Launcher")
    assert [len(turn["failures"]) for turn in found["turns"]] == [2, 2]
    assert all("ModuleNotFoundError" in line for line in found["turns"][0]["failures"])
    assert found["after"] == 2


@pytest.mark.skipif(sys.version_info < (3, 11), reason="PYTHONSAFEPATH is of Python 3.11")
def test_modules_of_the_working_folder_are_not_imported(tmp_path):
    (tmp_path / "triton.py").write_text("raise ImportError('of the working folder')", encoding="utf-8")
    found = run(tmp_path / "cache", folder=tmp_path)
    assert found["turns"][0] == {"asked": 2, "compiled": 2, "failures": []}


def test_a_process_that_compiles_ends_with_its_input():
    target = json.dumps(["cuda", 80, 32])
    child = subprocess.run([sys.executable, "-m", "vllm_triton.ahead_child", target, ""], input=b"", timeout=60, check=False)
    assert child.returncode == 0


def test_a_process_that_dies_is_a_failure_of_what_it_had_and_of_what_is_left():
    pool = ahead._Pool([sys.executable, "-c", "input()"], 1)
    for name in ("a", "b"):
        pool.add(ahead.Wanted("module", name, "{}", name, 1))
    assert pool.finish() == ["a: the process ended", "b: no process was left for it"]


def test_cores_are_never_more_than_the_process_may_use():
    assert 1 <= ahead.cores() <= len(os.sched_getaffinity(0))
