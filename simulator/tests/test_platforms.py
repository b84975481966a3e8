"""Whole platforms on simulated devices of their kind: engines end to end, what they refuse, how they fail.

What runs there has not run on hardware. vllm-ascend's are among its own tests: it shares no kernels with these.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

import vllm_simulator
from tools.tokens import LIMIT_S, SIZES, SMALL, found_in_child, in_child, tokens

ROOT = Path(__file__).resolve().parents[2]
REFERENCES = 'provider={"all": "reference"}'
BFLOAT16 = (*SIZES, "dtype=bfloat16")
COLLECTIVES = {"all_gather", "all_reduce"}
SILENT = ("vllm-rocm", "vllm-xpu", "vllm-triton")
"""Distributions that know of no simulator, vllm-ascend beside them."""


@dataclass(frozen=True)
class Platform:
    """What poses as its device, what it says when that is lost, and the vendor's kernels, whose stand-in is in its tests."""

    name: str
    pose: str
    chip: str
    lost: str
    vendor: str

    @property
    def distribution(self) -> str:
        """Also its provider's name."""
        return f"vllm-{self.name}"

    def machine(self, **settings) -> dict[str, str]:
        """Environment of a process that sees one device with 1 GiB."""
        return self._machine(dict(os.environ), memory_mib=1024, **settings)

    def equipped(self) -> dict[str, str]:
        """As `machine`, with room for a real model, and the stand-in for the vendor's kernels installed."""
        fakes = ROOT / "plugins" / self.distribution / "tests" / "fakes"
        return self._machine(dict(os.environ, PYTHONPATH=str(fakes)), memory_mib=4096)

    def _machine(self, environ: dict[str, str], **settings) -> dict[str, str]:
        return vllm_simulator.environment(environ=environ, pose=self.pose, chip=self.chip, **settings)


pytestmark = pytest.mark.timeout(3 * LIMIT_S)
"""Of children there are two at most, and a run on the host."""

ROCM = Platform("rocm", "hip", "gfx942", "the device was lost", "aiter")
XPU = Platform("xpu", "xpu", "pvc", "UR_RESULT_ERROR_DEVICE_LOST", "vllm-xpu-kernels")


@pytest.fixture(scope="module", params=[ROCM, XPU], ids=lambda one: one.name)
def platform(request) -> Platform:
    """Each that offers the kernels of vllm-triton, where it is installed."""
    pytest.importorskip(f"vllm_{request.param.name}")
    return request.param


@pytest.fixture(scope="module")
def small() -> str:
    """A random Llama of two layers."""
    models = pytest.importorskip("vllm_conformance.cases.runs.models")
    return str(models.folder_of("llama"))


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_two_layers_on_interpreted_kernels_give_the_tokens_of_the_host(platform, small, dtype, tmp_path):
    """End to end: every op that the package has a kernel for is that kernel's, in Triton's interpreter; none was demoted."""
    log, options = tmp_path / "log.json", (*SMALL, f"dtype={dtype}")
    machine = {**platform.machine(interpret=True), "SIMULATOR_LOG": str(log)}
    found = found_in_child(machine, platform.name, small, "2", *options)
    assert found["demoted"] == []
    own = f"kernel {platform.distribution}"
    assert {op for op, one in found["served"].items() if not one.startswith(own)} <= COLLECTIVES
    ran = launched(log)
    assert {"build_rows", "draw"} <= ran
    assert ran & {"decode", "extend"}
    assert found["tokens"] == tokens("cpu", small, 2, options)["tokens"]


@pytest.mark.slow
@pytest.mark.parametrize("codes", ["int8", "fp8"])
def test_two_layers_over_codes_on_interpreted_kernels_give_the_tokens_of_the_references(platform, small, codes):
    options = (*SMALL, "dtype=float32", f"kv_cache_dtype={codes}")
    found = found_in_child(platform.machine(interpret=True), platform.name, small, "2", *options)
    assert found["served"]["paged_attention"].startswith(f"kernel {platform.distribution}")
    assert found["tokens"] == found_in_child(platform.machine(), platform.name, small, "2", *options, REFERENCES)["tokens"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_experts_on_interpreted_kernels_give_the_tokens_of_the_host(platform, name, tmp_path):
    models, log = pytest.importorskip("vllm_conformance.cases.runs.models"), tmp_path / "log.json"
    folder, options = str(models.folder_of(name)), (*SMALL, "dtype=float32")
    machine = {**platform.machine(interpret=True), "SIMULATOR_LOG": str(log)}
    found = found_in_child(machine, platform.name, folder, "2", *options)
    assert found["demoted"] == []
    assert {found["served"][op] for op in ("moe_route", "moe")} == {f"kernel {platform.distribution}"}
    ran = launched(log)
    assert "route" in ran
    assert ran & {"grouped", "one_token"}
    assert found["tokens"] == tokens("cpu", folder, 2, options)["tokens"]


def launched(log: Path) -> set[str]:
    """Kernels that ran, by what each process appended."""
    return {name.removeprefix("triton::") for line in log.read_text().splitlines() for name in json.loads(line)["ops"]}


def test_a_lost_device_is_said(platform, small):
    done = in_child(platform.machine(fail="lost:aten::mm"), platform.name, small, "4", *SMALL, REFERENCES)
    assert done.returncode != 0
    assert platform.lost in done.stdout + done.stderr


def test_what_no_kernel_takes_is_refused_by_name(platform, small):
    """A KV dtype, then a block size."""
    ours, theirs = (f'provider={{"paged_attention": "{name}"}}' for name in (platform.distribution, platform.vendor))
    wrong = (*SMALL, theirs, "dtype=bfloat16", "kv_cache_dtype=fp8", "--", *SMALL, ours, "block_size=24")
    done = in_child(platform.equipped(), platform.name, small, "4", *wrong)
    assert done.returncode == 1, done.stderr[-2000:]
    dtype, size = (json.loads(line)["error"] for line in done.stdout.splitlines())
    assert "kv dtype: wanted fp8" in dtype
    assert "24" in size


@pytest.mark.model
def test_the_demo_model_gives_the_tokens_of_the_host_through_torch(platform):
    found = found_in_child(platform.equipped(), platform.name, "demo", "64", *SIZES, REFERENCES)
    assert found["tokens"] == tokens("cpu", "demo", 64, SIZES)["tokens"]
    assert found["demoted"] == []


@pytest.mark.slow
@pytest.mark.model
def test_the_demo_model_gives_the_references_tokens_with_vendor_calls(platform):
    chosen = json.dumps({"all": "reference", "paged_attention": platform.vendor, "gated_activation": platform.vendor})
    machine = platform.equipped()
    found = found_in_child(machine, platform.name, "demo", "64", *BFLOAT16, f"provider={chosen}")
    assert found["served"]["paged_attention"] == f"vendor {platform.vendor}"
    assert found["tokens"] == found_in_child(machine, platform.name, "demo", "64", *BFLOAT16, REFERENCES)["tokens"]


@pytest.mark.parametrize("distribution", SILENT)
def test_a_plugin_has_no_word_of_the_simulator(distribution):
    sources = list((ROOT / "plugins" / distribution / "src").rglob("*.py"))
    assert sources
    assert [str(path) for path in sources if "simulat" in path.read_text("utf-8").lower()] == []
