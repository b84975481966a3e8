"""The kernels as SPIR-V on Intel's runtime for processors, where compiler and runtime are installed (`nox -s xpu-kernels`)."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

CHILD = Path(__file__).with_name("spirv_on_cpu.py")
LIMIT_S = 900
OPS = {
    "norms": "rms_norm,add_rms_norm,layer_norm",
    "elementwise": "embedding,gather_rows,add,gated_activation,activation,rotary_embedding",
    "cache": "kv_write,kv_copy,kv_export,kv_import,qk_norm_rope_kv_write",
}
"""Attention and products are left out: without DPAS they are unrolled, and take this runtime longer than a test may."""


def _runtime() -> bool:
    try:
        metadata.distribution("intel-opencl-rt")
    except metadata.PackageNotFoundError:
        return False
    return importlib.util.find_spec("triton.backends.intel") is not None and importlib.util.find_spec("pyopencl") is not None


pytestmark = [pytest.mark.slow, pytest.mark.skipif(not _runtime(), reason="Intel's Triton or runtime is not installed here")]


def run(ops: str, dtypes: str) -> str:
    """In a process of its own: a runtime that meets what it does not know may abort."""
    command = [sys.executable, "-W", "ignore", str(CHILD), ops, dtypes]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode in (0, 1), done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("ops", OPS.values(), ids=list(OPS))
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_kernels_compute_what_the_references_do(ops, dtype):
    result = run(ops, dtype)
    assert re.search(r"^[1-9]\d* cases, 0 differences, [1-9]\d* launches", result, re.MULTILINE), result
