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
SOON = ("gfx942", "gfx1100")
LATER = tuple(name for name in families.ARCHITECTURES if name not in SOON)


@pytest.mark.parametrize("architecture", [*SOON, *(pytest.param(name, marks=pytest.mark.slow) for name in LATER)])
def test_products_in_tiles_of_the_architecture_are_those_of_the_reference(architecture):
    result = run(architecture, PRODUCTS)
    assert re.fullmatch(r"[1-9]\d* cases, 0 differences\n", result), result


@pytest.mark.slow
@pytest.mark.parametrize("architecture", families.ARCHITECTURES)
def test_attention_in_tiles_of_the_architecture_is_that_of_the_reference(architecture):
    result = run(architecture, ATTENTION)
    assert re.fullmatch(r"[1-9]\d* cases, 0 differences\n", result), result


def run(architecture: str, ops: str) -> str:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "vllm_rocm", architecture, ops, "float16"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr[-2000:]
    return done.stdout
