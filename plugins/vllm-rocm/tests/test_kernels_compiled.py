from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from functools import cache

import pytest

from vllm_rocm import machine_code
from vllm_rocm.backends import families
from vllm_triton.tried import NUMBERS

LIMIT_S = 1800
STEPS = ("1x1", "64x1", "1x2048")
MATRIX_KERNELS = {"extend", "decode", "few_rows"}
CODES = ("int8", "fp8_e4m3", "fp8_e5m2")
SOON = ("gfx942", "gfx1100")
ARCHITECTURES = [
    *SOON,
    *(pytest.param(name, marks=pytest.mark.slow) for name in families.ARCHITECTURES if name not in SOON),
]

pytestmark = pytest.mark.timeout(LIMIT_S + 60)


@cache
def compiled(architecture: str, model: str = "Qwen3-0.6B", *options: str) -> list[dict]:
    """Kernels of a model's steps."""
    steps = [argument for step in STEPS for argument in ("--step", step)]
    return machine_code_of(architecture, "--model", model, *options, *steps)


def machine_code_of(*arguments: str) -> list[dict]:
    """In a process of its own: a compiler that meets what it does not know may abort."""
    command = [sys.executable, "-W", "ignore", "-m", "vllm_rocm.machine_code", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [row for line in done.stdout.splitlines() if "kernel" in (row := json.loads(line))]


def spilled(rows: list[dict]) -> list[dict]:
    """Kernels with registers that did not fit: in memory, or scalar ones in lanes of vector registers."""
    return [row for row in rows if row["vector_spills"] or row["scalar_spills"] or row["scratch_bytes"]]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_compile_within_lds_and_registers_and_spill_nothing(architecture):
    rows, family = compiled(architecture), families.family_of(architecture)
    assert {"decode", "extend", "one_row", "few_rows", "build_rows", "draw"} <= {row["kernel"] for row in rows}
    assert [row for row in rows if row["lds_bytes"] > family.lds_bytes] == []
    assert [row for row in rows if row["vector_registers"] > family.registers] == []
    assert spilled(rows) == []
    assert [row for row in rows if row["resident"] < 1] == []


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_products_run_on_matrix_units(architecture):
    rows = [row for row in compiled(architecture) if row["kernel"] in MATRIX_KERNELS]
    assert [row for row in rows if not row["matrix_instructions"]] == []


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_kernel_is_predicted_at_more_than_twice_the_roofline(architecture):
    rows = [row for row in compiled(architecture) if row["floor_us"]]
    assert {"decode", "extend", "one_row", "few_rows"} <= {row["kernel"] for row in rows}
    assert [row for row in rows if row["predicted_us"] > 2 * row["floor_us"]] == []


@pytest.mark.slow
@pytest.mark.parametrize("architecture", families.ARCHITECTURES)
def test_the_same_holds_at_the_shapes_of_a_large_model(architecture):
    rows, family = compiled(architecture, "Qwen3-8B"), families.family_of(architecture)
    assert [row for row in rows if row["lds_bytes"] > family.lds_bytes] == []
    assert spilled(rows) == []
    assert [row for row in rows if row["predicted_us"] > 2 * row["floor_us"] > 0] == []


@pytest.mark.slow
@pytest.mark.parametrize("architecture", families.ARCHITECTURES)
def test_the_same_holds_for_experts(architecture):
    rows, family = compiled(architecture, "Qwen3-30B-A3B"), families.family_of(architecture)
    assert {"route", "count", "arrange", "grouped", "combine", "one_pair", "one_token"} <= {row["kernel"] for row in rows}
    assert [row for row in rows if row["lds_bytes"] > family.lds_bytes] == []
    assert spilled(rows) == []
    assert [row for row in rows if row["kernel"] == "grouped" and not row["matrix_instructions"]] == []
    assert {"grouped", "one_pair", "one_token"} <= {row["kernel"] for row in rows if row["floor_us"]}
    assert [row for row in rows if row["predicted_us"] > 2 * row["floor_us"] > 0] == []


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["int8", *(pytest.param(name, marks=pytest.mark.slow) for name in CODES[1:])])
def test_attention_over_a_cache_of_codes_spills_nothing(architecture, dtype):
    check_codes(architecture, "Qwen3-0.6B", dtype)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", families.ARCHITECTURES)
@pytest.mark.parametrize("dtype", CODES)
def test_the_same_holds_of_codes_at_the_shapes_of_a_large_model(architecture, dtype):
    check_codes(architecture, "Qwen3-8B", dtype)


def check_codes(architecture: str, model: str, dtype: str) -> None:
    rows, family = compiled(architecture, model, "--kv-dtype", dtype), families.family_of(architecture)
    attention = [row for row in rows if row["kernel"] in ("decode", "extend")]
    assert {row["kernel"] for row in attention} == {"decode", "extend"}
    assert [row for row in rows if row["lds_bytes"] > family.lds_bytes] == []
    assert [row for row in attention if row["vector_registers"] > family.registers] == []
    assert spilled(rows) == []
    assert [row for row in attention if not row["matrix_instructions"]] == []
    assert [row for row in attention if row["predicted_us"] > 2 * row["floor_us"] > 0] == []


def packed(architectures: Iterable[str]) -> list[tuple[str, str]]:
    """Each architecture with each format that is offered there; fp8_tensor has the kernels of fp8_channel."""
    families_of = [(name, families.family_of(name)) for name in architectures]
    return [(name, form) for name, family in families_of for form in sorted(family.tried.formats - {"plain", "fp8_tensor"})]


@pytest.mark.parametrize("architecture", SOON)
def test_products_with_packed_weights_spill_nothing(architecture):
    check_packed(architecture, "Qwen3-0.6B", "q4_0")


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "weights"), packed(families.ARCHITECTURES))
def test_the_same_holds_of_every_format_at_the_shapes_of_a_large_model(architecture, weights):
    check_packed(architecture, "Qwen3-8B", weights)


def check_packed(architecture: str, model: str, weights: str) -> None:
    rows, family = compiled(architecture, model, "--weights", weights), families.family_of(architecture)
    assert {"few_rows", "widen"} <= {row["kernel"] for row in rows}
    assert [row for row in rows if row["lds_bytes"] > family.lds_bytes] == []
    assert spilled(rows) == []
    assert [row for row in rows if row["kernel"] == "few_rows" and not row["matrix_instructions"]] == []


def claims(architecture: str) -> list[str]:
    """All that is offered of attention and products, by the dtypes of model and cache, or of model and the weights' format."""
    tried = families.family_of(architecture).tried
    numbers = sorted(NUMBERS)
    # "fp8" is another name of "fp8_e4m3", and "fp8_tensor" has the kernels of "fp8_channel".
    codes = [f"{dtype}/{kv_dtype}" for dtype in sorted(tried.dtypes) for kv_dtype in CODES]
    forms = [f"{dtype}:{form}" for dtype in sorted(tried.dtypes) for form in sorted(tried.formats - {"plain", "fp8_tensor"})]
    return [*(f"{dtype}/{dtype}" for dtype in numbers), *codes, *(f"{dtype}:plain" for dtype in numbers), *forms]


@pytest.mark.parametrize(
    ("architecture", "claim"),
    [("gfx942", "bfloat16/bfloat16"), ("gfx1100", "float16/int8"), ("gfx942", "bfloat16:int8_channel")],
)
def test_kernels_at_the_corners_of_a_claim_spill_nothing(architecture, claim):
    check_claim(architecture, claim, "--corners")


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "claim"), [(name, one) for name in families.ARCHITECTURES for one in claims(name)])
def test_every_kernel_of_a_claim_spills_nothing(architecture, claim):
    """Every size of heads and of blocks that is offered, not the benchmarks' alone."""
    check_claim(architecture, claim)


def check_claim(architecture: str, claim: str, *options: str) -> None:
    rows, family = machine_code_of(architecture, "--claim", claim, *options), families.family_of(architecture)
    wanted = (
        {"extend", "decode", "kv_write"} if "/" in claim else {"grouped"} if claim.endswith("plain") else {"few_rows", "widen"}
    )
    assert wanted <= {row["kernel"] for row in rows}
    assert [row for row in rows if row["lds_bytes"] > family.lds_bytes] == []
    assert [row for row in rows if row["vector_registers"] > family.registers] == []
    assert spilled(rows) == []


@pytest.mark.parametrize(
    ("registers", "architecture", "waves"), [(64, "gfx942", 8), (128, "gfx942", 4), (256, "gfx942", 2), (96, "gfx1100", 16)]
)
def test_waves_follow_from_registers(registers, architecture, waves):
    assert machine_code.waves_of(registers, families.family_of(architecture)) == waves


def test_lds_limits_how_many_programs_are_resident():
    family = families.CDNA3
    assert machine_code.resident_of(8, 4, 0, family) == 8
    assert machine_code.resident_of(8, 4, 40 << 10, family) == 1
