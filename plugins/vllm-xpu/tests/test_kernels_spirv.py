"""Intel's Triton makes SPIR-V of the kernels; where it is installed (`nox -s xpu-kernels`)."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from functools import cache

import pytest

from vllm_xpu.backends.families import family_of

LIMIT_S = 600
PRODUCTS = {"decode", "few_rows"}
STEPS = ("1x1", "64x1")

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("triton.backends.intel") is None, reason="Intel's Triton is not installed here"
    ),
    pytest.mark.timeout(LIMIT_S + 60),
]


@cache
def compiled(architecture: str, model: str = "Qwen3-0.6B", *options: str) -> list[dict]:
    """Kernels of a model's steps."""
    steps = [argument for step in STEPS for argument in ("--step", step)]
    return machine_code_of(architecture, "--model", model, *options, *steps)


def machine_code_of(*arguments: str) -> list[dict]:
    """In a process of its own: a compiler that meets what it does not know may abort."""
    command = [sys.executable, "-W", "ignore", "-m", "vllm_xpu.machine_code", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [row for line in done.stdout.splitlines() if "kernel" in (row := json.loads(line))]


@pytest.mark.parametrize("architecture", ["pvc", "dg2", "bmg"])
def test_kernels_compile_within_shared_local_memory(architecture):
    rows = compiled(architecture, "Qwen2.5-0.5B")
    assert {"decode", "one_row", "few_rows", "build_rows", "draw"} <= {row["kernel"] for row in rows}
    assert [row for row in rows if row["slm_bytes"] > family_of(architecture).slm_bytes] == []


def test_attention_that_is_not_offered_is_not_compiled_for_a_step():
    assert {"decode", "extend"}.isdisjoint({row["kernel"] for row in compiled("dg2", "Qwen3-0.6B")})


@pytest.mark.parametrize("architecture", ["pvc", "bmg"])
def test_products_use_dpas_where_the_compiler_knows_it(architecture):
    """On dg2 this release of the compiler gives products to the vector engines."""
    rows = [row for row in compiled(architecture) if row["kernel"] in PRODUCTS]
    assert [row for row in rows if not row["matrix_ops"]] == []


@pytest.mark.parametrize("dtype", ["int8", "fp8_e4m3", "fp8_e5m2"])
def test_attention_over_a_cache_of_codes_takes_dpas_and_as_little_shared_local_memory(dtype):
    rows = compiled("pvc", "Qwen2.5-0.5B", "--kv-dtype", dtype)
    attention = [row for row in rows if row["kernel"] == "decode"]
    assert attention
    assert [row for row in attention if not row["matrix_ops"]] == []
    assert [row for row in rows if row["slm_bytes"] > family_of("pvc").slm_bytes] == []


@pytest.mark.skipif(shutil.which("ocloc") is None, reason="Intel's offline compiler is not installed here")
@pytest.mark.parametrize("dtype", ["int8", "fp8_e4m3", "fp8_e5m2"])
def test_attention_over_a_cache_of_codes_spills_nothing(dtype):
    rows = compiled("pvc", "Qwen2.5-0.5B", "--kv-dtype", dtype, "--step", "1x2048", "--ocloc")
    spills = {row["kernel"]: row["spills"] for row in rows if row["kernel"] in ("decode", "extend", "qk_norm_rope_kv_write")}
    assert spills == {"decode": 0, "extend": 0, "qk_norm_rope_kv_write": 0}


@pytest.mark.parametrize("architecture", ["pvc", "dg2", "bmg"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_kernels_at_the_corners_of_a_claim_fit_into_shared_local_memory(architecture, dtype):
    check_claim(architecture, f"{dtype}/{dtype}", "--corners")


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["pvc", "dg2", "bmg"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_kernel_of_a_claim_fits_into_shared_local_memory(architecture, dtype):
    """Every size of heads and of blocks that is offered, not the benchmarks' alone."""
    check_claim(architecture, f"{dtype}/{dtype}")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("ocloc") is None, reason="Intel's offline compiler is not installed here")
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_kernel_over_a_cache_of_codes_that_is_offered_spills_nothing(dtype, kv_dtype):
    rows = check_claim("pvc", f"{dtype}/{kv_dtype}", "--ocloc")
    assert [row for row in rows if row["spills"]] == []


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("ocloc") is None, reason="Intel's offline compiler is not installed here")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_attention_of_dg2_spills_nothing_where_a_tile_has_all_heads_that_share_one(dtype):
    rows = check_claim("dg2", f"{dtype}/{dtype}", "--corners", "--ocloc")
    few = [row for row in rows if row["kernel"] in ("decode", "extend", "attention") and row["step"].startswith("8 heads")]
    assert {row["kernel"] for row in few} == {"decode", "extend", "attention"}
    assert [row for row in few if row["spills"]] == []


def check_claim(architecture: str, claim: str, *options: str) -> list[dict]:
    rows = machine_code_of(architecture, "--claim", claim, *options)
    assert {"extend", "decode", "kv_write"} <= {row["kernel"] for row in rows}
    assert [row for row in rows if row["slm_bytes"] > family_of(architecture).slm_bytes] == []
    return rows


@pytest.mark.parametrize("architecture", ["pvc", "dg2", "bmg"])
def test_the_same_holds_for_experts(architecture):
    rows = compiled(architecture, "Qwen3-30B-A3B")
    assert {"route", "arrange", "grouped", "combine", "one_pair", "one_token"} <= {row["kernel"] for row in rows}
    assert [row for row in rows if row["slm_bytes"] > family_of(architecture).slm_bytes] == []
    if architecture != "dg2":
        assert [row for row in rows if row["kernel"] == "grouped" and not row["matrix_ops"]] == []
