from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

from vllm_rocm import machine_code
from vllm_rocm.backends import families
from vllm_triton import claimed

LIMIT_S, CLAIMS_LIMIT_S = 1800, 7200
KINDS = {"kernel", "claim"}
TILE = 64
"""Keys of the widest tile of gfx942."""

A_FEW = 4
"""Registers by which kernels differ whose addresses have other constants."""

STEPS = ("1x1", "64x1", "1x2048")
MATRIX_KERNELS = {"extend", "decode", "few_rows"}
CODES = ("int8", "fp8_e4m3", "fp8_e5m2")
SOON = ("gfx942", "gfx1100")
ARCHITECTURES = [
    *SOON,
    *(pytest.param(name, marks=pytest.mark.slow) for name in families.ARCHITECTURES if name not in SOON),
]

WIDE_CODES = [name for name in families.ARCHITECTURES if families.family_of(name).tried.codes.largest_head >= 128]
"""Architectures that are offered caches of codes for heads of 128, which the larger models have."""

pytestmark = pytest.mark.timeout(LIMIT_S + 60)


@cache
def compiled(architecture: str, model: str = "Qwen3-0.6B", *options: str) -> list[dict]:
    """Kernels of a model's steps."""
    steps = [argument for step in STEPS for argument in ("--step", step)]
    return machine_code_of(architecture, "--model", model, *options, *steps)


def machine_code_of(*arguments: str, limit_s: float = LIMIT_S) -> list[dict]:
    """In a process of its own: a compiler that meets what it does not know may abort."""
    command = [sys.executable, "-W", "ignore", "-m", "vllm_rocm.machine_code", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit_s, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [row for line in done.stdout.splitlines() if KINDS & (row := json.loads(line)).keys()]


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
    check_codes(architecture, "Qwen3-0.6B" if architecture in WIDE_CODES else "Qwen2.5-0.5B", dtype)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", WIDE_CODES)
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


@pytest.mark.parametrize(
    ("architecture", "claim"),
    [("gfx942", "bfloat16/bfloat16"), ("gfx1100", "float16/int8"), ("gfx942", "bfloat16:int8_channel")],
)
def test_kernels_at_the_corners_of_a_claim_spill_nothing(architecture, claim):
    check_claims(architecture, machine_code_of(architecture, "--claim", claim, "--corners"), [claim])


@pytest.mark.slow
@pytest.mark.timeout(CLAIMS_LIMIT_S + 60)
@pytest.mark.parametrize("architecture", families.ARCHITECTURES)
def test_every_kernel_of_every_claim_spills_nothing(architecture):
    """Every kind of heads and of blocks that is offered, not the benchmarks' alone; `tools/amd_claims.py` keeps them."""
    rows = machine_code_of(architecture, "--claim", machine_code.EVERY, limit_s=CLAIMS_LIMIT_S)
    check_claims(architecture, rows, machine_code.claims_of(architecture))


def check_claims(architecture: str, rows: list[dict], claims: list[str]) -> None:
    kernels, family = [row for row in rows if "kernel" in row], families.family_of(architecture)
    assert {"extend", "decode", "kv_write", "few_rows", "widen", "grouped"} & {row["kernel"] for row in kernels}
    assert [row for row in kernels if row["lds_bytes"] > family.lds_bytes] == []
    assert [row for row in kernels if row["vector_registers"] > family.registers] == []
    assert spilled(kernels) == []
    assert [(row["claim"], row["spilled"]) for row in rows if "claim" in row] == [(claim, 0) for claim in claims]
    assert all(row["kernels"] for row in rows if "claim" in row)


@pytest.mark.slow
def test_sizes_that_are_alike_take_the_same_registers():
    """So that one of them speaks for all in a claim (`vllm_triton.claimed`)."""
    taken = defaultdict(list)
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("alike_child.py")), "gfx942"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    for line in done.stdout.splitlines():
        kernel, heads, blocks, registers = json.loads(line)
        taken[kernel, claimed.alike_heads(heads), claimed.alike_blocks(blocks, TILE)].append(registers)
    assert {kernel for kernel, *_ in taken} == {"extend", "decode"}
    assert all(len(registers) > 1 for registers in taken.values())
    assert [registers for registers in taken.values() if max(registers) - min(registers) > A_FEW] == []


@pytest.mark.parametrize(
    ("registers", "architecture", "waves"), [(64, "gfx942", 8), (128, "gfx942", 4), (256, "gfx942", 2), (96, "gfx1100", 16)]
)
def test_waves_follow_from_registers(registers, architecture, waves):
    assert machine_code.waves_of(registers, families.family_of(architecture)) == waves


def test_lds_limits_how_many_programs_are_resident():
    family = families.CDNA3
    assert machine_code.resident_of(8, 4, 0, family) == 8
    assert machine_code.resident_of(8, 4, 40 << 10, family) == 1
