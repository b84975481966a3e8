"""Kernels read nothing beside their tensors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("guarded.py")


@pytest.mark.skipif(sys.platform != "linux", reason="pages are protected as Linux does it")
def test_a_tile_of_several_blocks_reads_nothing_behind_the_block_table_and_the_sinks():
    environ = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    classes = ("gqa/q3/k1/d32/b8/sinks", "gqa/q3/k1/d32/b1/window", "one_token/q2/k1/d32/b1/kv_int8")
    command = [sys.executable, "-W", "ignore", str(SCRIPT), *classes]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=280, check=False)
    assert (done.returncode, done.stdout) == (0, "3\n"), f"touched a page without access: {done.stderr[-2000:]}"
