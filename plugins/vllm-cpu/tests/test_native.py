"""The native chain: what is tried, what is refused, and a library of a few lines that really runs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from vllm_core.api import UnsupportedError
from vllm_cpu import native
from vllm_cpu.backends import native as offers

ROOT = Path(__file__).parents[3]
HEADER = ROOT / "core" / "include"


def test_the_example_of_the_documentation_is_loaded_and_offers_what_it_lists(build, source, monkeypatch) -> None:
    monkeypatch.setenv(native.VARIABLE, build(source))
    found = native.load()
    assert found.ops == {"rms_norm"}
    assert [set(offer.ops) for offer in offers.offers()] == [{"rms_norm"}]


def test_the_example_of_the_documentation_computes(build, source) -> None:
    import ctypes

    library = native.find({native.VARIABLE: build(source)}).library
    x, weight, out = torch.randn(5, 8), torch.rand(8), torch.zeros(5, 8)
    pointers = [None, out.data_ptr(), x.data_ptr(), None, weight.data_ptr(), None]

    class Arguments(ctypes.Structure):
        _fields_ = [
            *((name, ctypes.c_void_p) for name in ("stream", "out", "x", "residual", "weight", "bias")),
            *((name, ctypes.c_int64) for name in ("outer", "inner", "size", "out_stride", "x_stride", "dtype")),
            ("eps", ctypes.c_double),
        ]

    assert library.vllm_rms_norm(ctypes.byref(Arguments(*pointers, 5, 1, 8, 8, 8, 0, 1e-6))) == 0
    torch.testing.assert_close(out, torch.nn.functional.rms_norm(x, (8,), weight, 1e-6))


def test_a_library_of_another_abi_is_refused_with_both_versions(build, source) -> None:
    path = build(source.replace("return VLLM_OPS_ABI_VERSION", "return VLLM_OPS_ABI_VERSION + 7"))
    with pytest.raises(UnsupportedError, match=f"ABI version {native.ABI_VERSION + 7}") as caught:
        native.find({native.VARIABLE: path})
    assert path in caught.value.on


def test_a_library_that_lists_an_op_which_it_lacks_is_refused(build, source) -> None:
    path = build(source.replace('"rms_norm"', '"rms_norm linear"'))
    with pytest.raises(UnsupportedError, match="missing symbols: vllm_linear"):
        native.find({native.VARIABLE: path})


def test_a_library_of_something_else_is_refused(build) -> None:
    with pytest.raises(UnsupportedError, match="no symbol vllm_ops_abi_version"):
        native.find({native.VARIABLE: build("int answer(void) { return 42; }")})


def test_a_path_that_does_not_exist_is_an_error_and_never_passed_over(tmp_path) -> None:
    with pytest.raises(UnsupportedError, match="cannot open"):
        native.find({native.VARIABLE: str(tmp_path / "none.so")})


def test_without_a_library_the_chain_says_so_and_nothing_is_offered(tmp_path, monkeypatch) -> None:
    missing = tmp_path / native.LIBRARY
    monkeypatch.setattr(native, "packaged", lambda: missing)
    found = native.find({})
    assert (found.library, found.ops) == (None, frozenset())
    assert str(missing) in str(found)
    assert "no native library in this build" in str(found)


def test_a_broken_packaged_library_is_recorded_and_passed_over(tmp_path, monkeypatch) -> None:
    broken = tmp_path / "broken.so"
    broken.write_text("not a library")
    monkeypatch.setattr(native, "packaged", lambda: broken)
    found = native.find({})
    assert found.library is None
    assert found.tried[0].path == str(broken)


def test_a_source_distribution_has_the_header_of_the_checkout() -> None:
    ours = ROOT / "plugins" / "vllm-cpu" / "native" / "include" / "vllm" / "ops.h"
    if not HEADER.is_dir() or not ours.is_file():
        pytest.skip("needs the repository")
    assert ours.read_bytes() == (HEADER / "vllm" / "ops.h").read_bytes()


def test_nothing_but_the_abi_is_exported() -> None:
    """What else were visible could be taken from, or for, another library of the process."""
    path = native.packaged()
    if not path.exists() or not shutil.which("nm"):
        pytest.skip("needs the library and nm")
    lines = subprocess.run(["nm", "-D", "--defined-only", str(path)], check=True, capture_output=True, text=True).stdout
    exported = {line.split()[-1] for line in lines.splitlines()}
    assert "vllm_linear" in exported
    assert [name for name in sorted(exported) if not name.startswith("vllm_")] == []
