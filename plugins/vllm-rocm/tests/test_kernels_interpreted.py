from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_rocm.backends import families

SCRIPT = Path(__file__).resolve().parents[3] / "tools" / "interpret_ops.py"
LIMIT_S = 280

PRODUCTS = "linear,linear_add,rms_norm_linear,rms_norm_gated_linear"
ATTENTION = "paged_attention"
ONE_FAMILY_EACH = "gfx942,gfx1100"
"""Of waves of 64 with MFMA, and of 32 with WMMA."""


def test_products_in_tiles_of_the_architectures_are_those_of_the_reference():
    check(ONE_FAMILY_EACH, f"{PRODUCTS}:one_token,block_edges,mixed")


def test_attention_over_codes_in_tiles_of_the_architectures_is_that_of_the_reference():
    check(ONE_FAMILY_EACH, f"{ATTENTION}:mixed/kv_int8,mixed/kv_fp8")


@pytest.mark.slow
@pytest.mark.parametrize("op", [PRODUCTS, ATTENTION])
@pytest.mark.parametrize("architecture", families.ARCHITECTURES)
def test_the_same_holds_in_every_class_and_of_attention(architecture, op):
    check(architecture, op)


def check(architectures: str, ops: str) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "vllm_rocm", architectures, "float16", "0", ops],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr[-2000:]
    assert re.fullmatch(r"[1-9]\d* cases, 0 differences\n", done.stdout), done.stdout
