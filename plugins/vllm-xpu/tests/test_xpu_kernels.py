from __future__ import annotations

import inspect
import re
from importlib import import_module, metadata
from pathlib import Path

import pytest
import torch

from vllm_core.api import load_entry
from vllm_core.ops.check import Provider, mismatches
from vllm_core.ops.inputs import SHAPE_CLASSES
from vllm_triton.token_major import kv_layout
from vllm_xpu import probe
from vllm_xpu.backends import xpu_kernels as backend
from vllm_xpu.ops import xpu_kernels

FAKES = Path(__file__).with_name("fakes")
LIBRARY = "vllm_xpu_kernels/_C.abi3.so"


@pytest.fixture
def provider(monkeypatch, make_facts):
    """The wrappers over a stand-in for Intel's distribution."""
    monkeypatch.syspath_prepend(str(FAKES))
    offers = backend.offers(make_facts(xpu_kernels="0.1.16"))
    return Provider({op: load_entry(entry) for one in offers for op, entry in one.ops.items()}, kv_layout)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("op", ["kv_write", "paged_attention", "kv_copy", "kv_export", "kv_import", "gated_activation"])
def test_the_wrapper_computes_what_the_reference_does(provider, op, dtype):
    for shape in SHAPE_CLASSES[op]:
        assert mismatches(op, provider, dtype, 0, shape) == [], shape


def test_the_stand_in_has_the_schemas_that_are_relied_on(provider):
    import_module("vllm_xpu_kernels._C")
    for name, schema in xpu_kernels.SCHEMAS.items():
        found = getattr(torch.ops._C, name).default._schema
        assert [one.name for one in found.arguments] == re.findall(r"\w+!? (\w+)[,)]", schema), name


def test_the_stand_in_has_the_arguments_that_are_given(provider):
    found = inspect.signature(getattr(import_module(xpu_kernels.ATTENTION[0]), xpu_kernels.ATTENTION[1])).parameters
    assert set(xpu_kernels.ATTENTION_ARGUMENTS) <= set(found)


def test_the_version_is_read_from_the_distribution(monkeypatch):
    monkeypatch.syspath_prepend(str(FAKES))
    assert probe.installed_kernels() == "0.1.16"


def test_the_vendors_package_declares_what_is_relied_on():
    """Against the distribution itself, where it is installed: schemas lie in its library as text, for it loads on XPU alone."""
    try:
        vendor = metadata.distribution("vllm-xpu-kernels")
    except metadata.PackageNotFoundError:
        pytest.skip("vllm-xpu-kernels is not installed")
    text = re.sub(rb"\s+", b" ", Path(str(vendor.locate_file(LIBRARY))).read_bytes()).replace(b" )", b")")
    for name, schema in xpu_kernels.SCHEMAS.items():
        assert f"{name}{schema}".encode() in text, name
    source = Path(str(vendor.locate_file("vllm_xpu_kernels/flash_attn_interface.py"))).read_text("utf-8")
    head = source.partition(f"def {xpu_kernels.ATTENTION[1]}(")[2].partition("):\n")[0]
    assert set(xpu_kernels.ATTENTION_ARGUMENTS) <= set(re.findall(r"^    (\w+)", head, re.MULTILINE))
