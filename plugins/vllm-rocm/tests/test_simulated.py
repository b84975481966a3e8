"""The plugin's own Python on a simulated device that torch takes for a HIP one. What runs there has not run on hardware.

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
from vllm_rocm.device import RocmDevice
from vllm_rocm.probe import probe
facts = probe().devices[0]
device = RocmDevice(facts)
out = {"architecture": facts.architecture, "properties": dict(facts.properties)}
try:
    device.allocate("kv", (1 << 33,), torch.uint8)
except MemoryBudgetError as error:
    out["refused"] = str(error)
out["after"] = float(device.allocate("kv", (4,), torch.float32).sum())
x, y = device.allocate("workspace", (4,), torch.float32), device.allocate("workspace", (4,), torch.float32)
graph = device.capture(lambda: torch.add(x, 1.0, out=y))
x.fill_(2.0)
graph.replay()
device.synchronize()
out["replayed"] = y.tolist()
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def machine() -> dict[str, str]:
    """Environment of a process that sees one simulated gfx942, with AITER's stand-in installed."""
    environ = dict(os.environ, PYTHONPATH=str(FAKES))
    return simulator.environment(environ=environ, pose="hip", chip="gfx942", memory_mib=4096)


@pytest.fixture(scope="module")
def answers(machine) -> dict:
    """What one process finds out there."""
    return found_in_child(machine, "-c", QUESTIONS)


def test_the_device_is_found_and_named(answers):
    assert answers["architecture"] == "gfx942"
    assert answers["properties"]["fp8"] == "fnuz"
    assert answers["properties"]["aiter"] == "0.1.7"


def test_out_of_memory_is_a_memory_error_of_four_parts(answers):
    assert answers["refused"].count("expected") == 1
    assert answers["after"] == 0.0


def test_a_captured_step_replays_on_new_contents(answers):
    assert answers["replayed"] == [3.0, 3.0, 3.0, 3.0]
