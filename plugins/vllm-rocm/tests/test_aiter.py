from __future__ import annotations

import ast
import inspect
from importlib import import_module, metadata
from pathlib import Path

import pytest

from vllm_core.api import load_entry
from vllm_core.ops.check import Provider, mismatches
from vllm_core.ops.inputs import SHAPE_CLASSES
from vllm_rocm import probe
from vllm_rocm.backends import aiter as backend
from vllm_rocm.ops import aiter
from vllm_triton.token_major import kv_layout

FAKES = Path(__file__).with_name("fakes")


@pytest.fixture
def provider(monkeypatch, make_facts):
    """AITER's wrappers over its stand-in."""
    monkeypatch.syspath_prepend(str(FAKES))
    offers = backend.offers(make_facts(aiter="0.1.7"))
    return Provider({op: load_entry(entry) for one in offers for op, entry in one.ops.items()}, kv_layout)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("op", ["kv_write", "paged_attention", "kv_copy", "kv_export", "kv_import", "gated_activation"])
def test_the_wrapper_computes_what_the_reference_does(provider, op, dtype):
    for shape in SHAPE_CLASSES[op]:
        assert mismatches(op, provider, dtype, 0, shape) == [], shape


def test_the_stand_in_has_the_signatures_that_are_relied_on(provider):
    for name, parameters in aiter.SIGNATURES.items():
        module, _, function = name.partition(":")
        found = inspect.signature(getattr(import_module(module), function)).parameters
        assert tuple(found) == parameters, name


def test_the_version_is_read_from_the_distribution(monkeypatch):
    monkeypatch.syspath_prepend(str(FAKES))
    assert probe.installed_aiter() == "0.1.7"


def test_the_vendors_package_declares_what_is_relied_on():
    """Against AITER itself, where it is installed: its sources are parsed, since it cannot be imported without ROCm."""
    try:
        vendor = metadata.distribution("amd-aiter")
    except metadata.PackageNotFoundError:
        pytest.skip("amd-aiter is not installed")
    declared = {}
    for module in {name.partition(":")[0] for name in aiter.SIGNATURES}:
        path = Path(str(vendor.locate_file(f"{module.replace('.', '/')}.py")))
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.FunctionDef):
                declared[f"{module}:{node.name}"] = tuple(argument.arg for argument in node.args.args)
    assert {name: declared.get(name) for name in aiter.SIGNATURES} == dict(aiter.SIGNATURES)
