"""`platforms explain` on machines that look like each: what would run there, or what keeps it from running, with the fix."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

ROOT = Path(__file__).resolve().parents[3]
LIMIT_S = 240
PLATFORM = "ascend"
EXPECTED = {
    "one": ("910b", "paged_attention", "vllm-ascend", "Ascend 910B3"),
    "eight": ("910b", "vllm-ascend"),
    "two dies": ("910c", "vllm-ascend"),
    "none": ("npu-smi: not found", "install the Ascend driver"),
    "broken driver": ("dcmi module initialize failed", "reload or reinstall the driver"),
    "wrong version": ("8.0.0", "8.5"),
    "wrong torch_npu": ("2.9.0; this package was written for 2.13",),
    "no device files": ("no /dev/davinci*", "--device /dev/davinci0"),
    "unknown chip": ("310P3",),
}


@pytest.fixture
def reports(tmp_path_factory, machine_in, listings):
    """Reports of the probe, each of a machine in a folder of its own."""

    def look(printed=None, versions=None, toolkit="8.5.0", without=()):
        made = machine_in(tmp_path_factory.mktemp("machine"))
        made.printed = made.printed if printed is None else printed
        made.versions = made.versions if versions is None else versions
        made.toolkit(toolkit)
        for path in without:
            made.without(path)
        return made.probe()

    everything = ("dev/*", "usr/local/Ascend/driver/*", "usr/local/Ascend/ascend-toolkit/latest/*/*")
    return {
        "one": look(),
        "eight": look(listings["a2"](8)),
        "two dies": look(listings["a3"]),
        "none": look(listings["missing"], versions={"torch": "2.13.0"}, without=everything),
        "broken driver": look(listings["broken"]),
        "wrong version": look(toolkit="8.0.0"),
        "wrong torch_npu": look(versions={"torch": "2.9.0", "torch_npu": "2.9.0"}),
        "no device files": look(listings["broken"], without=("dev/*",)),
        "unknown chip": look(listings["a2"](1, "310P3")),
    }


def test_every_machine_is_explained(reports, tmp_path):
    """One child plans for all of them: a plan names architecture, providers and block size; a refusal names the check."""
    file = tmp_path / "reports.json"
    file.write_bytes(msgspec.json.encode(reports))
    command = [sys.executable, str(ROOT / "tools" / "explain_machines.py"), PLATFORM, str(file)]
    environ = {**os.environ, "COLUMNS": "400", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found) == set(reports)
    for name, words in EXPECTED.items():
        said = found[name]
        assert said["status"] == (0 if "vllm-ascend" in words else 2), (name, said["text"])
        assert [word for word in words if word not in said["text"]] == [], (name, said["text"])
