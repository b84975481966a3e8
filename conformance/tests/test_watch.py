"""Patches are counted in every process that loads the plugin, and a process that does not answer is seen."""

from __future__ import annotations

import os
import sys
import textwrap

import pytest

from vllm_conformance.watch import VARIABLE, processes_in, watched

CHILD = "import patcher, time; time.sleep(60)"
PARENT = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}])
import patcher
from vllm_conformance import watch
import json, os, pathlib, time
folder = pathlib.Path(json.loads(os.environ[watch.VARIABLE])["folder"])
while len(list(folder.glob("*.begun"))) < 2:
    time.sleep(0.05)
watch.compare()
child.kill()
print("compared")
"""


@pytest.fixture
def patcher(tmp_path, monkeypatch):
    """Write a plugin whose import does something."""

    def write(code):
        (tmp_path / "patcher.py").write_text(textwrap.dedent(code))
        monkeypatch.syspath_prepend(tmp_path)

    return write


def test_a_patch_is_found_in_the_process_and_in_its_child(patcher):
    patcher("from vllm_core import outputs\noutputs.RequestOutput.text = 'patched'\n")
    seen = watched([sys.executable, "-c", PARENT], "patcher", "toy")
    assert (seen.status, seen.output.strip()) == (0, "compared")
    changes = "vllm_core.outputs.RequestOutput.text: added"
    assert [one.changes for one in seen.processes] == [(changes,), (changes,)]


def test_a_plugin_that_changes_nothing_counts_zero(patcher):
    patcher("value = 1\n")
    code = "import patcher; from vllm_conformance import watch; watch.compare()"
    seen = watched([sys.executable, "-c", code], "patcher", "toy")
    assert [one.changes for one in seen.processes] == [()]


def test_a_process_that_ends_without_an_answer_has_none(patcher):
    patcher("import os\nos._exit(7)\n")
    seen = watched([sys.executable, "-c", "import patcher"], "patcher", "toy")
    assert seen.status == 7
    assert [one.changes for one in seen.processes] == [None]


def test_a_process_that_does_not_load_the_plugin_is_not_counted(patcher):
    patcher("value = 1\n")
    seen = watched([sys.executable, "-c", "print('hello')"], "patcher", "toy")
    assert (seen.output.strip(), seen.processes) == ("hello", ())


def test_a_sitecustomize_that_was_there_before_still_runs(patcher, tmp_path):
    patcher("value = 1\n")
    (tmp_path / "sitecustomize.py").write_text("import os\nos.environ['WAS_THERE'] = 'yes'\n")
    code = "import os, patcher; print(os.environ['WAS_THERE']); from vllm_conformance import watch; watch.compare()"
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    seen = watched([sys.executable, "-c", code], "patcher", "toy", environ)
    assert (seen.status, seen.output.strip()) == (0, "yes")
    assert [one.changes for one in seen.processes] == [()]


def test_outside_of_a_watch_nothing_is_there(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert processes_in(tmp_path) == ()
