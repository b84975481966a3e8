"""`platforms explain` on machines that look like each: what would run there, or what keeps it from running, with the fix."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from vllm_xpu.driver import DriverError

ROOT = Path(__file__).resolve().parents[3]
LIMIT_S = 240
PLATFORM = "xpu"
EXPECTED = {
    "one": ("pvc", "paged_attention", "vllm-xpu", "Intel(R) Data Center GPU Max 1550"),
    "card": ("bmg", "vllm-xpu", "Intel(R) Arc(TM) B580 Graphics"),
    "eight": ("pvc", "vllm-xpu"),
    "none": ("no GPU of Intel's in /sys",),
    "broken driver": ("none for 0000:04:00.0", "dmesg"),
    "wrong version": ("2.8.0", "2.10"),
    "no device files": ("none in /dev/dri", "--device=/dev/dri"),
    "integrated": ("a part of the processor, and no card", "ONEAPI_DEVICE_SELECTOR=level_zero:0"),
    "integrated, chosen": ("lnl", "vllm-xpu"),
}


@pytest.fixture
def reports(tmp_path_factory, probe_in, make_torch):
    """Reports of the probe, each of a machine in a folder of its own."""

    def look(*names, **sources):
        return probe_in(tmp_path_factory.mktemp("machine"), *names, **sources)

    def missing():
        raise OSError("libze_loader.so.1: cannot open shared object file")

    def refused():
        raise DriverError("zeInit: status 0x78000001")

    without = make_torch(xpu=None, version="2.13.0+cpu")
    idle = make_torch(error="No XPU devices are available.")
    return {
        "one": look("max1550"),
        "card": look("b580"),
        "eight": look(*["max1550"] * 8),
        "none": look(sysfs=False, zero=missing, torch_build=lambda: without),
        "broken driver": look("b580", loaded=False, torch_build=lambda: idle),
        "wrong version": look("b580", torch_build=lambda: make_torch("b580", version="2.8.0+xpu")),
        "no device files": look("b580", files=False, zero=refused, torch_build=lambda: idle),
        "integrated": look("lunar"),
        "integrated, chosen": look("lunar", environ={"ONEAPI_DEVICE_SELECTOR": "level_zero:0"}),
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
        assert said["status"] == (0 if "vllm-xpu" in words else 2), (name, said["text"])
        assert [word for word in words if word not in said["text"]] == [], (name, said["text"])
