"""What must not be in the sources of plugins whose hardware is simulated: a word of what stands for it in tests, or
mathematics of references. Kernels of vllm-triton compute, and are left out."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent / "plugins"
KERNELS = ROOT / "vllm-triton" / "src" / "vllm_triton" / "kernels"
PLUGINS = ("vllm-ascend", "vllm-rocm", "vllm-triton", "vllm-xpu")
SOURCES = sorted(path for name in PLUGINS for path in (ROOT / name / "src").rglob("*.py") if path.parent != KERNELS)
MATHEMATICS = {"einsum", "softmax", "scaled_dot_product_attention", "rsqrt", "silu", "gelu", "sigmoid", "matmul"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_source_knows_of_a_simulator_or_brings_reference_mathematics(path):
    text = path.read_text(encoding="utf-8")
    assert not re.search("simulat", text, re.IGNORECASE)
    names = {node.attr for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)}
    assert not names & MATHEMATICS


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_source_takes_a_reference_of_core(path):
    text = path.read_text(encoding="utf-8")
    names = {node.attr for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)}
    assert not names & {"load_reference", "reference"}
