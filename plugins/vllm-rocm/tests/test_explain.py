"""`platforms explain` on machines that look like each: what would run there, or what keeps it from running, with the fix."""

from __future__ import annotations

import pytest

from tools.explain_machines import missing
from vllm_rocm.driver import DriverError

PLATFORM = "rocm"
EXPECTED = {
    "one": ("gfx942", "paged_attention", "vllm-rocm", "AMD Instinct MI300X"),
    "consumer": ("gfx1201", "vllm-rocm", "AMD Radeon RX 9070 XT"),
    "eight": ("gfx942", "vllm-rocm"),
    "none": ("amdgpu is not loaded", "install the amdgpu driver"),
    "broken driver": ("no GPU in the KFD topology", "dmesg"),
    "wrong version": ("6.4.43482", "7.0"),
    "no device files": ("/dev/kfd", "--device=/dev/kfd"),
    "unknown chip": ("gfx906",),
}


@pytest.fixture
def reports(tmp_path_factory, probe_in, make_torch):
    """Reports of the probe, each of a machine in a folder of its own."""

    def look(*names, **sources):
        return probe_in(tmp_path_factory.mktemp("machine"), *names, **sources)

    def missing():
        raise OSError("libamdhip64.so: cannot open shared object file")

    def refused():
        raise DriverError("hipInit: hipErrorNoDevice (100)")

    without = make_torch(hip=None, version="2.13.0+cpu")
    idle = make_torch(error="No HIP GPUs are available")
    broken = tmp_path_factory.mktemp("broken")
    (broken / "sys/module/amdgpu").mkdir(parents=True)
    return {
        "one": look("mi300x"),
        "consumer": look("rx9070"),
        "eight": look(*["mi300x"] * 8, linked=True),
        "none": look(sysfs=False, hip=missing, torch_build=lambda: without),
        "broken driver": probe_in(broken, sysfs=False, hip=refused, torch_build=lambda: idle),
        "wrong version": look("mi350x", torch_build=lambda: make_torch("mi350x", hip="6.4.43482")),
        "no device files": look("mi300x", files=False, hip=refused, torch_build=lambda: idle),
        "unknown chip": look("vega"),
    }


def test_every_machine_is_explained(reports, monkeypatch):
    """A plan names architecture, providers and block size; a refusal names the check."""
    monkeypatch.setenv("COLUMNS", "400")
    assert set(EXPECTED) == set(reports)
    assert missing(PLATFORM, reports, EXPECTED) == []
