"""A step of another size, or with other features, waits for no compiler; and what is asked of one, it takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("variants.py")


@pytest.fixture(scope="module")
def variants() -> dict[str, dict[str, int]]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, dict[str, int]] = json.loads(done.stdout)
    return found


def test_heads_of_every_size_have_a_kernel_whose_options_the_compiler_takes(variants):
    assert variants["heads"]["qk_norm_rope_kv_write"] > 30


def test_any_number_of_masked_rows_shares_one_kernel(variants):
    assert variants["masks"] == {"grammar_mask": 1}


def test_any_combination_of_bias_and_forbidden_tokens_shares_one_kernel(variants):
    assert variants["features"] == {"adjust": 1}


def test_any_number_of_log_probabilities_shares_two_kernels(variants):
    assert variants["log_probabilities"] == {"survey": 1, "conclude": 1}
