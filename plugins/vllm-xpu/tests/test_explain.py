"""`platforms explain` on machines that look like each: what would run there, or what keeps it from running, with the fix."""

from __future__ import annotations

import pytest

from tools.explain_machines import missing
from vllm_xpu.driver import DriverError

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


def test_every_machine_is_explained(reports, monkeypatch):
    """A plan names architecture, providers and block size; a refusal names the check."""
    monkeypatch.setenv("COLUMNS", "400")
    assert set(EXPECTED) == set(reports)
    assert missing(PLATFORM, reports, EXPECTED) == []
