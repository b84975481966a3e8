"""Failures on order, and a machine without a compiler."""

from __future__ import annotations

import subprocess

import pytest

from vllm_core.api import UnsupportedError
from vllm_toy import extension, probe, settings

NORM = "ops.rms_norm(x, x, x[0], 1e-6); "


def test_the_nth_allocation_fails_once(child):
    code = """
from vllm_core.api import MemoryBudgetError
outcomes = []
for _ in range(3):
    try:
        outcomes.append(device.allocate("kv", (4,), torch.uint8).numel())
    except MemoryBudgetError:
        outcomes.append("full")
print(outcomes)"""
    assert child(code, VLLM_TOY_FAIL="oom:3").stdout.strip() == "[4, 'full', 4]", "the first was x"


@pytest.mark.parametrize("fault", ["crash:rms_norm", "crash:2"])
def test_a_crash_is_a_real_one(child, fault):
    assert child(NORM + "device.synchronize()", VLLM_TOY_FAIL=fault).returncode == -11


def test_a_hang_lasts(child):
    code = "import threading, os; threading.Timer(1.0, lambda: os._exit(7)).start(); " + NORM + "device.synchronize()"
    assert child(code, VLLM_TOY_FAIL="hang:rms_norm").returncode == 7


def test_one_op_computes_wrong_numbers_and_the_others_do_not(child):
    code = NORM + "print(round(x.cpu()[0, 0].item(), 3))"
    assert child(code, VLLM_TOY_FAIL="wrong:rms_norm").stdout.strip() == "2.0"
    assert child(code, VLLM_TOY_FAIL="wrong:linear").stdout.strip() == "1.0"


@pytest.mark.parametrize("text", ["oom", "oom:rms_norm", "hang:", "crash:rms_nrom", "wrong:3", "melt:3"])
def test_a_failure_that_cannot_be_simulated_is_refused(monkeypatch, text):
    monkeypatch.setenv("VLLM_TOY_FAIL", text)
    with pytest.raises(UnsupportedError, match="VLLM_TOY_FAIL"):
        settings.faults()
    assert probe.probe().devices == ()


def test_without_a_compiler_the_probe_says_how_to_get_one(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    report = probe.probe()
    assert report.devices == ()
    assert [(check.name, "apt install g++" in check.hint) for check in report.failures] == [("compiler", True)]
    with pytest.raises(UnsupportedError, match="no compiler"):
        extension.load()


def test_what_the_compiler_says_reaches_the_user(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def broken(command, **options):
        return subprocess.CompletedProcess(command, 1, "", "toy.cpp:1: error: no such thing\n")

    monkeypatch.setattr(subprocess, "run", broken)
    with pytest.raises(UnsupportedError, match="no such thing"):
        extension.load()
    assert not list(tmp_path.rglob("*.so"))


def test_visible_devices_are_those_of_the_variable(monkeypatch):
    monkeypatch.setenv("VLLM_TOY_VISIBLE_DEVICES", "1")
    assert [facts.id for facts in probe.probe().devices] == ["1"]
    monkeypatch.setenv("VLLM_TOY_VISIBLE_DEVICES", "")
    assert probe.probe().devices == ()
