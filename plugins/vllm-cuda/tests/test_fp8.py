"""Products with inputs rounded to fp8: where they are offered, which weights they take, what a weight is made into, results."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest
import torch

from vllm_core.api import Accepted, CallSite, QuantTensor, Rejected
from vllm_core.api.ops import FP8_ACTIVATION
from vllm_cuda import chip, fp8_linear, nvrtc, packed_linear
from vllm_cuda.backends import families
from vllm_cuda.backends.fp8 import CHIPS, few, results, takes
from vllm_cuda.backends.offers import FP8_PROVIDER, _packed, _rounding
from vllm_cuda.fp8_codes import program
from vllm_cuda.packed import Packed, pack
from vllm_triton.ops import quant

FOLDER = Path(__file__).parent
COMPILER = shutil.which(os.environ.get("CXX", "c++"))
LIMIT_S = 600
ASKED = CallSite(op="linear", role="linear", dtype="bfloat16", features=frozenset({FP8_ACTIVATION}))


@pytest.fixture
def judged(make_facts):
    """What the offer says of a call site on a chip whose torch is built for a version of CUDA."""

    def judge(architecture: str = "sm_90", runtime: str = "13.0", site: CallSite = ASKED, compiler: bool = True):
        facts = replace(make_facts(architecture), runtime_version=runtime)
        built = frozenset(families.family_of(architecture).architectures)
        return _rounding(_packed(compiler, built), facts).judge(site, architecture)

    return judge


@pytest.mark.parametrize("architecture", sorted(CHIPS))
def test_it_is_offered_on_chips_with_fp8_where_it_is_asked_for(judged, architecture):
    assert judged(architecture) == Accepted()
    assert judged(architecture, site=replace(ASKED, dtype="float16")) == Accepted()
    assert isinstance(judged(architecture, site=replace(ASKED, dtype="float32")), Rejected)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_86", "sm_120"])
def test_other_chips_are_refused_by_name(judged, architecture):
    verdict = judged(architecture)
    assert isinstance(verdict, Rejected)
    assert (verdict.need, verdict.wanted) == ("architecture", architecture)


@pytest.mark.parametrize(("runtime", "fits"), [("12.8", False), ("12.9", True), ("13.0", True), ("", False), ("12", False)])
def test_an_older_toolkit_is_refused_with_both_versions(judged, runtime, fits):
    verdict = judged(runtime=runtime)
    assert verdict == (Accepted() if fits else Rejected("toolkit of torch", "12.9", runtime or "unknown"))


def test_exact_products_are_never_its(judged):
    assert judged(site=replace(ASKED, features=frozenset())) == Rejected("inputs", "exact", "rounded to fp8")


def test_without_a_compiler_there_is_none_for_the_weights_that_stay_exact(judged):
    verdict = judged(compiler=False)
    assert isinstance(verdict, Rejected)
    assert verdict.need == "compiler"


def test_weights_of_other_formats_and_sizes_are_not_taken():
    assert takes("fp8_channel", 48, 80, "sm_89")
    assert takes("fp8_tensor", 16, 16, "sm_100")
    assert takes("fp8_block128", 256, 1024, "sm_90")
    for form, rows, columns, architecture in (
        ("fp8_channel", 40, 80, "sm_90"),
        ("fp8_channel", 48, 72, "sm_90"),
        ("fp8_block128", 192, 1024, "sm_90"),
        ("fp8_block128", 256, 640, "sm_90"),
        ("fp8_block128", 256, 1024, "sm_100"),
        ("int8_channel", 256, 1024, "sm_90"),
    ):
        assert not takes(form, rows, columns, architecture), (form, rows, columns, architecture)


def test_results_are_of_any_dtype_on_hopper_alone():
    assert [results(dtype, "sm_90") for dtype in ("bfloat16", "float16", "float32")] == [True, True, True]
    assert [results(dtype, "sm_89") for dtype in ("bfloat16", "float16", "float32")] == [True, False, False]


def weight_of(form: str, rows: int, columns: int) -> QuantTensor:
    sizes = {"fp8_tensor": (1,), "fp8_channel": (rows,), "fp8_block128": (-(-rows // 128), -(-columns // 128))}
    data = torch.randint(0, 256, (rows, columns), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    # No code is NaN, whose row would be.
    data = torch.where(data & 0x7F == 0x7F, data - 1, data)
    return QuantTensor(form, (rows, columns), data.view(torch.float8_e4m3fn), torch.rand(sizes[form]) + 0.5)


@pytest.mark.parametrize("form", ["fp8_tensor", "fp8_channel", "fp8_block128"])
def test_a_weight_is_kept_once_with_scales_as_the_library_reads_them(form):
    chip.use(chip.Chip("sm_90", 132, 227 << 10))
    weight = weight_of(form, 256, 1024)
    found = fp8_linear.linear_pack(weight, None, ())
    assert isinstance(found, fp8_linear.Packed)
    assert torch.equal(found.exact.codes, packed_linear.linear_pack(weight, None, ()).codes)
    if form == "fp8_block128":
        assert (found.scale.shape, found.scale.stride()) == ((8, 2), (1, 8))
        assert torch.equal(found.scale.t(), weight.scale)
    else:
        assert (found.scale.shape, found.scale.is_contiguous()) == ((1, 256), True)
        assert torch.equal(found.scale[0], weight.scale.expand(256))
    plain = fp8_linear.linear_pack(torch.zeros(16, 16), None, ())
    assert not isinstance(plain, (Packed, fp8_linear.Packed))
    narrow = fp8_linear.linear_pack(weight_of("fp8_channel", 40, 80), None, ())
    assert isinstance(narrow, Packed)


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(("rows", "columns"), [(32, 128), (40, 208), (19, 1160), (272, 384)])
def test_codes_are_put_in_the_order_that_they_had_and_nothing_else_is_written(tmp_path, rows, columns):
    source = resources.files("vllm_cuda").joinpath("kernels").joinpath("fp8_codes.cu")
    library = tmp_path / "codes.so"
    flags = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-DDEPENDENT=1", f'-DKERNEL="{source}"']
    subprocess.run([str(COMPILER), *flags, str(FOLDER / "emulated_fp8_codes.cpp"), "-o", str(library)], check=True)
    data = torch.randint(0, 256, (rows, columns), generator=torch.Generator().manual_seed(rows)).to(torch.uint8)
    weight = QuantTensor("fp8_channel", (rows, columns), data.view(torch.float8_e4m3fn), torch.rand(rows))
    packed = pack(quant.pack(weight, None, on="linear_pack"))
    assert packed is not None
    out = torch.full((rows * columns + 64,), 0xA5, dtype=torch.uint8)
    blocks = -(-(packed.codes.shape[0] * packed.codes.shape[1]) // 4)
    ctypes.CDLL(str(library)).run(
        blocks, 128, ctypes.c_void_p(packed.codes.data_ptr()), ctypes.c_void_p(out.data_ptr()), rows, columns
    )
    assert torch.equal(out[: rows * columns].view(rows, columns), data)
    assert (out[rows * columns :] == 0xA5).all()


@pytest.mark.skipif(not nvrtc.installed(), reason="needs NVRTC: pip install nvidia-cuda-nvrtc")
@pytest.mark.parametrize("architecture", sorted(CHIPS))
def test_the_kernel_compiles_for_every_chip(architecture):
    assert program(architecture).binary()


def test_products_of_many_rows_are_those_of_rounded_inputs():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(FOLDER / "rounded_products.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr[-2000:]
    assert re.fullmatch(r"[1-9]\d* cases, 0 differences\n", done.stdout), done.stdout


@pytest.mark.parametrize("architecture", ["sm_89", "sm_90"])
def test_the_plan_tells_from_how_many_rows_on(make_facts, architecture):
    offer = _rounding(_packed(True, frozenset({architecture})), make_facts(architecture))
    assert offer.provider == FP8_PROVIDER
    assert f"of more than {few(architecture)} rows" in offer.note
