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
LIMIT_S = 1800
OPS = {
    "norms": "rms_norm,add_rms_norm,layer_norm",
    "elementwise": "embedding,gather_rows,add,gated_activation,activation,rotary_embedding",
    "cache": "kv_write,kv_copy,kv_export,kv_import,qk_norm_rope_kv_write",
}
FEW = {
    "products": ("linear,linear_add,rms_norm_linear,gated_linear,rms_norm_gated_linear", "float16", "one_token,mixed"),
    "attention": ("paged_attention", "float16", "decode/plain,mixed/plain"),
    "experts": ("moe_route,moe", "float16", "one_token,mixed"),
    "batch": ("batch_update,build_step,advance,grammar_mask,soft_cap", "float32", "mixed"),
}
"""Ops with many or large kernels, of which each form takes up to a minute to build, in a few classes of shapes. Encoder
attention, sampling and log-probabilities are left out: they were not run to their end there."""


def _runtime() -> bool:
    try:
        metadata.distribution("intel-opencl-rt")
    except metadata.PackageNotFoundError:
        return False
    return importlib.util.find_spec("triton.backends.intel") is not None and importlib.util.find_spec("pyopencl") is not None


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not _runtime(), reason="Intel's Triton or runtime is not installed here"),
    pytest.mark.timeout(LIMIT_S + 60),
]


def run(*arguments: str) -> str:
    """In a process of its own: a runtime that meets what it does not know may abort."""
    command = [sys.executable, "-W", "ignore", str(CHILD), *arguments]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode in (0, 1), done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("ops", OPS.values(), ids=list(OPS))
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_kernels_compute_what_the_references_do(ops, dtype):
    result = run(ops, dtype)
    assert re.search(r"^[1-9]\d* cases, 0 differences, [1-9]\d* launches", result, re.MULTILINE), result


@pytest.mark.parametrize("chosen", FEW.values(), ids=list(FEW))
def test_products_attention_experts_and_batches_do_so_in_a_few_classes(chosen):
    result = run(*chosen)
    assert re.search(r"^[1-9]\d* cases, 0 differences, [1-9]\d* launches", result, re.MULTILINE), result
