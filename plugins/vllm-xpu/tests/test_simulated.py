"""The plugin's own Python on a simulated device that torch takes for an XPU. What runs there has not run on hardware.

Its engines run in the simulator's own tests, `test_platforms.py`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tools.tokens import found_in_child

simulator = pytest.importorskip("vllm_simulator")

FAKES = Path(__file__).with_name("fakes")
QUESTIONS = """
import json, torch
from vllm_core.api import MemoryBudgetError
from vllm_xpu.device import XpuDevice
from vllm_xpu.probe import probe
facts = probe().devices[0]
device = XpuDevice(facts)
out = {"architecture": facts.architecture, "properties": dict(facts.properties)}
try:
    device.allocate("kv", (1 << 33,), torch.uint8)
except MemoryBudgetError as error:
    out["refused"] = str(error)
out["after"] = float(device.allocate("kv", (4,), torch.float32).sum())
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def machine() -> dict[str, str]:
    """Environment of a process that sees one simulated Max 1550, with a stand-in for vllm-xpu-kernels."""
    environ = dict(os.environ, PYTHONPATH=str(FAKES))
    return simulator.environment(environ=environ, pose="xpu", chip="pvc", memory_mib=4096)


@pytest.fixture(scope="module")
def answers(machine) -> dict:
    """What one process finds out there."""
    return found_in_child(machine, "-c", QUESTIONS)


def test_the_device_is_found_and_named(answers):
    assert answers["architecture"] == "pvc"
    assert answers["properties"]["slm_bytes"] == str(128 << 10)
    assert answers["properties"]["xpu_kernels"] == "0.1.16"


def test_out_of_memory_is_a_memory_error_of_four_parts(answers):
    assert answers["refused"].count("expected") == 1
    assert answers["after"] == 0.0


def test_integrated_graphics_are_left_alone():
    laptop = simulator.environment(environ=dict(os.environ), pose="xpu", chip="lnl", memory_mib=1024)
    code = "from vllm_xpu.probe import probe; print(len(probe().devices))"
    assert found_in_child(laptop, "-c", code) == 0
    assert found_in_child({**laptop, "ONEAPI_DEVICE_SELECTOR": "level_zero:0"}, "-c", code) == 1
