"""The plugin's own Python on a simulated device that torch takes for a HIP one. What runs there has not run on hardware."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

simulator = pytest.importorskip("vllm_simulator")

ROOT = Path(__file__).resolve().parents[3]
FAKES = Path(__file__).with_name("fakes")
LIMIT_S = 280
OPENED = (
    "import torch\nfrom vllm_rocm import probe\nfrom vllm_rocm.device import RocmDevice\n"
    "device = RocmDevice(probe.probe().devices[0])\n"
)
SIZES = ("max_model_len=256", "max_num_seqs=4", "dtype=float32")
SMALL = (*SIZES, "skip_tokenizer_init=true", "kv_cache_memory_bytes=8388608", "max_num_batched_tokens=64")


def run(command: list[str], environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    # The probe imports torch there, which takes long where much else runs.
    more = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "VLLM_CORE_PROBE_TIMEOUT_S": "120"}
    environment = {**environ, **more}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def serve(platform: str, environ: dict[str, str], model: str, count: int, *options: str) -> subprocess.CompletedProcess[str]:
    return run([sys.executable, str(ROOT / "tools" / "tokens.py"), platform, model, str(count), *options], environ)


def tokens(platform: str, environ: dict[str, str], count: int, *options: str, model: str = "demo") -> dict:
    sizes = SIZES if model == "demo" else SMALL
    done = serve(platform, environ, model, count, *sizes, *options)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


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


def test_the_device_is_found_and_named(machine):
    code = "import json; from vllm_rocm.probe import probe; one = probe().devices[0]\n"
    code += "print(json.dumps([one.architecture, one.properties]))"
    done = run([sys.executable, "-c", code], machine)
    assert done.returncode == 0, done.stderr[-2000:]
    architecture, properties = json.loads(done.stdout.splitlines()[-1])
    assert architecture == "gfx942"
    assert properties["fp8"] == "fnuz"
    assert properties["aiter"] == "0.1.7"


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_two_layers_on_interpreted_kernels_give_the_tokens_of_the_host(small, dtype, tmp_path):
    """End to end: every op that the package has a kernel for is that kernel's, in Triton's interpreter; none was demoted."""
    log = tmp_path / "log.json"
    machine = simulator.environment(environ=dict(os.environ), pose="hip", chip="gfx942", memory_mib=1024, interpret=True)
    found = tokens("rocm", {**machine, "SIMULATOR_LOG": str(log)}, 2, f"dtype={dtype}", model=small)
    assert found["demoted"] == []
    assert {op for op, one in found["served"].items() if not one.startswith("kernel vllm-rocm")} <= {"all_gather", "all_reduce"}
    ran = {name.removeprefix("triton::") for line in log.read_text().splitlines() for name in json.loads(line)["ops"]}
    assert {"build_rows", "draw"} <= ran
    assert ran & {"decode", "extend"}
    expected = tokens("cpu", dict(os.environ), 2, f"dtype={dtype}", model=small)["tokens"]
    assert found["tokens"] == expected


REFERENCES = 'provider={"all": "reference"}'
OURS = 'provider={"paged_attention": "vllm-rocm"}'


@pytest.mark.parametrize(
    ("fail", "options", "text"),
    [
        ("lost:aten::mm", (REFERENCES,), "the device was lost"),
        ("", (REFERENCES, "kv_cache_dtype=fp8"), "fp8"),
        ("", (OURS, "block_size=24"), "24"),
    ],
    ids=["device lost", "unsupported KV dtype", "unsupported block size"],
)
def test_what_goes_wrong_is_said(small, fail, options, text):
    machine = simulator.environment(environ=dict(os.environ), pose="hip", chip="gfx942", memory_mib=1024, fail=fail)
    done = serve("rocm", machine, small, 4, *SMALL, *options)
    assert done.returncode != 0
    assert text in done.stderr


@pytest.mark.model
def test_the_demo_model_gives_the_tokens_of_the_host_through_torch(machine):
    found = tokens("rocm", machine, 64, 'provider={"all": "reference"}')
    assert found["tokens"] == tokens("cpu", dict(os.environ), 64)["tokens"]
    assert found["demoted"] == []


@pytest.mark.slow
@pytest.mark.model
def test_the_demo_model_gives_the_references_tokens_with_vendor_calls(machine):
    chosen = '{"all": "reference", "paged_attention": "aiter", "gated_activation": "aiter"}'
    found = tokens("rocm", machine, 64, f"provider={chosen}", "dtype=bfloat16")
    assert found["served"]["paged_attention"] == "vendor aiter"
    assert found["tokens"] == tokens("rocm", machine, 64, 'provider={"all": "reference"}', "dtype=bfloat16")["tokens"]


def test_out_of_memory_is_a_memory_error_of_four_parts(machine):
    small = simulator.environment(environ=dict(os.environ), pose="hip", chip="gfx942", memory_mib=64)
    code = OPENED + (
        "from vllm_core.api import MemoryBudgetError\n"
        "try:\n    device.allocate('kv', (1 << 30,), torch.uint8)\n"
        "except MemoryBudgetError as error:\n    print(str(error).count('expected'))\n"
        "print(float(device.allocate('kv', (4,), torch.float32).sum()))"
    )
    done = run([sys.executable, "-c", code], small)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-2:] == ["1", "0.0"]


def test_a_captured_step_replays_on_new_contents(machine):
    code = OPENED + (
        "x, y = device.allocate('workspace', (4,), torch.float32), device.allocate('workspace', (4,), torch.float32)\n"
        "graph = device.capture(lambda: torch.add(x, 1.0, out=y))\n"
        "x.fill_(2.0)\ngraph.replay()\ndevice.synchronize()\nprint(y.tolist())"
    )
    done = run([sys.executable, "-c", code], machine)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "[3.0, 3.0, 3.0, 3.0]"


def test_the_plugin_has_no_word_of_the_simulator():
    sources = [*(ROOT / "plugins/vllm-rocm/src").rglob("*.py"), *(ROOT / "plugins/vllm-triton/src").rglob("*.py")]
    assert sources
    assert [str(path) for path in sources if "simulat" in path.read_text("utf-8").lower()] == []
