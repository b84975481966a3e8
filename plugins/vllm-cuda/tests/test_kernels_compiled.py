from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_cuda.backends import families

SCRIPT = Path(__file__).with_name("compiled.py")
LIMIT_S = 1800
DECODE, PREFILL = ("1x1", "64x1"), ("4x32",)
FEW_SPILLS = 256
"""Bytes of a thread's stack: Hopper's tiles of prompts with such heads spill up to 192."""

SOON = ("sm_80", "sm_90", "sm_120")
LATER = tuple(name for name in families.ARCHITECTURES if name not in SOON)


@pytest.mark.parametrize("architecture", [*SOON, *(pytest.param(name, marks=pytest.mark.slow) for name in LATER)])
def test_kernels_compile_within_the_chips_shared_memory_and_without_spills(architecture):
    rows = compile_for(architecture, *DECODE, *PREFILL)
    names = {row["kernel"] for row in rows}
    assert {"decode", "decode_fresh", "extend", "one_row", "few_rows", "build_rows", "draw", "settle"} <= names
    fits(architecture, rows)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", families.ARCHITECTURES)
def test_kernels_of_quantised_weights_caches_and_encoders_compile_within_the_same_limits(architecture):
    rows = compile_for(architecture, "rest")
    assert {"widen", "attention", "pool", "survey", "kv_import"} <= {row["kernel"] for row in rows}
    fits(architecture, rows)


@pytest.mark.parametrize(
    "architecture",
    ["sm_90", *(pytest.param(name, marks=pytest.mark.slow) for name in families.ARCHITECTURES if name != "sm_90")],
)
def test_kernels_of_experts_compile_within_the_same_limits(architecture):
    rows = compile_for(architecture, "experts")
    assert {"route", "count", "arrange", "grouped", "combine", "one_pair", "one_token"} <= {row["kernel"] for row in rows}
    fits(architecture, rows)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", families.ARCHITECTURES)
def test_kernels_of_heads_of_256_in_any_dtype_compile_within_shared_memory_and_with_few_spills(architecture):
    rows = compile_for(architecture, "large")
    assert {"extend", "decode", "attention"} <= {row["kernel"] for row in rows}
    fits(architecture, rows, spilled=FEW_SPILLS)


def fits(architecture: str, rows: list[dict], *, spilled: int = 0) -> None:
    limit = families.family_of(architecture).shared_bytes
    assert [row for row in rows if row["shared"] > limit] == []
    assert [row for row in rows if row["stack"] > spilled] == []


def compile_for(architecture: str, *sizes: str) -> list[dict]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), architecture, *sizes], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]
