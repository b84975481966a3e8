"""Rows rounded to fp8: the kernel, interpreted, against core's definition of the rounding."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("rounded.py")
LIMIT_S = 300


def test_rows_are_rounded_as_the_reference_has_it_normed_or_not_with_one_scale_or_many():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode in (0, 1), done.stderr[-2000:]
    assert re.fullmatch(r"[1-9]\d* cases, 0 differences\n", done.stdout), done.stdout
