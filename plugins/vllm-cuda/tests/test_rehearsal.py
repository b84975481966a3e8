from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("rehearsed.py")


@pytest.fixture(scope="module")
def phases() -> dict[str, dict]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT)], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {found["phase"]: found for found in map(json.loads, done.stdout.splitlines())}


def test_a_rehearsal_asks_for_the_kernels_of_prompts_of_single_rows_of_batches_and_of_every_tail(phases):
    names = set(phases["rehearsal"]["variants"])
    assert {"extend", "decode", "decode_fresh", "one_row", "few_rows", "qk_norm_rope_kv_write", "build_rows"} <= names
    assert {"advance", "draw", "tally", "settle", "penalise", "adjust", "survey"} <= names


def test_warm_up_launches_nothing_that_the_rehearsal_did_not_ask_for(phases):
    assert phases["warm-up"]["asked"] > 20
    assert phases["warm-up"]["variants"] == {}


def test_nothing_is_left_to_compile_while_serving(phases):
    assert phases["serving"]["asked"] > 20
    assert phases["serving"]["variants"] == {}
