"""`platforms explain` on machines that look like each: what would run there, or what keeps it from running, with the fix."""

from __future__ import annotations

import pytest

from tools.explain_machines import missing

PLATFORM = "ascend"
EXPECTED = {
    "one": ("910b", "paged_attention", "vllm-ascend", "Ascend 910B3"),
    "eight": ("910b", "vllm-ascend"),
    "two dies": ("910c", "vllm-ascend"),
    "none": ("npu-smi: not found", "install the Ascend driver"),
    "broken driver": ("dcmi module initialize failed", "reload or reinstall the driver"),
    "wrong version": ("8.0.0", "8.5"),
    "wrong torch_npu": ("2.9.0", "2.13"),
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


def test_every_machine_is_explained(reports, monkeypatch):
    """A plan names architecture, providers and block size; a refusal names the check."""
    monkeypatch.setenv("COLUMNS", "400")
    assert set(EXPECTED) == set(reports)
    assert missing(PLATFORM, reports, EXPECTED) == []
