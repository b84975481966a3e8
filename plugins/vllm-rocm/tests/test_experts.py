"""A model of experts on a simulated device that torch takes for a HIP one, its kernels in Triton's interpreter."""

from __future__ import annotations

import json
import os

import pytest

from tools.tokens import SMALL, found_in_child, tokens

simulator = pytest.importorskip("vllm_simulator")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_experts_on_interpreted_kernels_give_the_tokens_of_the_host(name, tmp_path):
    models, log = pytest.importorskip("vllm_conformance.cases.runs.models"), tmp_path / "log.json"
    folder, options = str(models.folder_of(name)), (*SMALL, "dtype=float32")
    machine = simulator.environment(environ=dict(os.environ), pose="hip", chip="gfx942", memory_mib=1024, interpret=True)
    found = found_in_child({**machine, "SIMULATOR_LOG": str(log)}, "rocm", folder, "2", *options)
    assert found["demoted"] == []
    assert {found["served"][op] for op in ("moe_route", "moe")} == {"kernel vllm-rocm"}
    ran = {name.removeprefix("triton::") for line in log.read_text().splitlines() for name in json.loads(line)["ops"]}
    assert "route" in ran
    assert ran & {"grouped", "one_token"}
    assert found["tokens"] == tokens("cpu", folder, 2, options)["tokens"]
