"""The plugin's own Python on a simulated device that torch takes for a HIP one. What runs there has not run on hardware."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tools.tokens import SIZES, SMALL, found_in_child, in_child, tokens

simulator = pytest.importorskip("vllm_simulator")

ROOT = Path(__file__).resolve().parents[3]
FAKES = Path(__file__).with_name("fakes")


REFERENCES = 'provider={"all": "reference"}'
OURS = 'provider={"paged_attention": "vllm-rocm"}'
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
def small() -> str:
    """A random Llama of two layers."""
    models = pytest.importorskip("vllm_conformance.cases.runs.models")
    return str(models.folder_of("llama"))


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


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_two_layers_on_interpreted_kernels_give_the_tokens_of_the_host(small, dtype, tmp_path):
    """End to end: every op that the package has a kernel for is that kernel's, in Triton's interpreter; none was demoted."""
    log = tmp_path / "log.json"
    machine = on_a_small_one(interpret=True)
    options = (*SMALL, f"dtype={dtype}")
    found = found_in_child({**machine, "SIMULATOR_LOG": str(log)}, "rocm", small, "2", *options)
    assert found["demoted"] == []
    assert {op for op, one in found["served"].items() if not one.startswith("kernel vllm-rocm")} <= {"all_gather", "all_reduce"}
    ran = {name.removeprefix("triton::") for line in log.read_text().splitlines() for name in json.loads(line)["ops"]}
    assert {"build_rows", "draw"} <= ran
    assert ran & {"decode", "extend"}
    assert found["tokens"] == tokens("cpu", small, 2, options)["tokens"]


def on_a_small_one(**settings) -> dict[str, str]:
    return simulator.environment(environ=dict(os.environ), pose="hip", chip="gfx942", memory_mib=1024, **settings)


def test_a_lost_device_is_said(small):
    done = in_child(on_a_small_one(fail="lost:aten::mm"), "rocm", small, "4", *SMALL, REFERENCES)
    assert done.returncode != 0
    assert "the device was lost" in done.stdout + done.stderr


def test_what_no_kernel_takes_is_refused_by_name(small):
    """A KV dtype, then a block size."""
    wrong = (*SMALL, REFERENCES, "kv_cache_dtype=fp8", "--", *SMALL, OURS, "block_size=24")
    done = in_child(on_a_small_one(), "rocm", small, "4", *wrong)
    assert done.returncode == 1, done.stderr[-2000:]
    dtype, size = (json.loads(line)["error"] for line in done.stdout.splitlines())
    assert "fp8" in dtype
    assert "24" in size


@pytest.mark.model
def test_the_demo_model_gives_the_tokens_of_the_host_through_torch(machine):
    found = found_in_child(machine, "rocm", "demo", "64", *SIZES, REFERENCES)
    assert found["tokens"] == tokens("cpu", "demo", 64, SIZES)["tokens"]
    assert found["demoted"] == []


@pytest.mark.slow
@pytest.mark.model
def test_the_demo_model_gives_the_references_tokens_with_vendor_calls(machine):
    chosen = '{"all": "reference", "paged_attention": "aiter", "gated_activation": "aiter"}'
    bfloat16 = (*SIZES, "dtype=bfloat16")
    found = found_in_child(machine, "rocm", "demo", "64", *bfloat16, f"provider={chosen}")
    assert found["served"]["paged_attention"] == "vendor aiter"
    assert found["tokens"] == found_in_child(machine, "rocm", "demo", "64", *bfloat16, REFERENCES)["tokens"]


def test_the_plugin_has_no_word_of_the_simulator():
    sources = [*(ROOT / "plugins/vllm-rocm/src").rglob("*.py"), *(ROOT / "plugins/vllm-triton/src").rglob("*.py")]
    assert sources
    assert [str(path) for path in sources if "simulat" in path.read_text("utf-8").lower()] == []
