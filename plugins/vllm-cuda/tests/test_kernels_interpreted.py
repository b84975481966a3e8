from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("interpreted.py")
LIMIT_S = 240

FAST = (
    "rms_norm",
    "add_rms_norm",
    "embedding",
    "gather_rows",
    "gated_activation",
    "linear",
    "linear_add",
    "rms_norm_linear",
    "rms_norm_gated_linear",
    "kv_write",
    "rotary_embedding",
    "qk_norm_rope_kv_write",
    "batch_update",
    "build_step",
    "advance",
)
SLOW = ("paged_attention", "sample")


@pytest.mark.parametrize("op", [*FAST, *(pytest.param(op, marks=pytest.mark.slow) for op in SLOW)])
def test_the_kernel_computes_what_the_reference_does(op):
    result = run(op, "float16")
    assert re.fullmatch(r"[1-9]\d* cases, 0 differences\n", result), result


def run(*arguments: str) -> str:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
