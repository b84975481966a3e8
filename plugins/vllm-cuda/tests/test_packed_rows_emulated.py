"""The product with a packed weight on the host (`emulated_packed.cpp`): layout, rings, clusters and sums, without a GPU."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from vllm_core.api import QuantTensor
from vllm_core.ops.quant import decode, dequantize, quantize
from vllm_cuda.packed import Packed, pack
from vllm_cuda.packed_rows import rows_program
from vllm_cuda.packed_tiles import PackedForm, PackedTile
from vllm_cuda.tiles import ADD, GATED, PLAIN
from vllm_triton.ops import quant

EMULATOR = Path(__file__).with_name("emulated_packed.cpp")
COMPILER = shutil.which(os.environ.get("CXX", "c++"))

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

GUARD = 64
"""Elements around what is written, which must stay as they are."""

ACTIVATIONS = (functional.silu, functional.gelu)
Build = Callable[..., ctypes.CDLL]


def weight_of(name: str, rows: int, columns: int, seed: int) -> QuantTensor:
    """Random codes whose numbers are about columns ** -0.5."""
    g = torch.Generator().manual_seed(seed)
    shape, size = (rows, columns), columns**-0.5
    kind, _, group = name.partition("/")
    if kind == "int4_group":
        groups = columns // int(group)
        data = torch.randint(0, 256, (rows, columns // 2), generator=g).to(torch.uint8)
        zero = torch.randint(0, 16, (rows, groups), generator=g).to(torch.uint8)
        return QuantTensor(kind, shape, data, torch.rand(rows, groups, generator=g).half() * size / 8, zero)
    if kind == "int8_channel":
        data = torch.randint(-128, 128, shape, generator=g).to(torch.int8)
        return QuantTensor(kind, shape, data, torch.rand(rows, generator=g) * size / 64)
    if kind.startswith("fp8"):
        sizes = {"fp8_channel": (rows,), "fp8_block128": (-(-rows // 128), -(-columns // 128))}
        data = (torch.randn(shape, generator=g) * 20).to(torch.float8_e4m3fn)
        return QuantTensor(kind, shape, data, (torch.rand(sizes[kind], generator=g) + 0.5) * size / 20)
    return quantize(torch.randn(shape, generator=g) * size, name)


@pytest.fixture(scope="session")
def build(tmp_path_factory) -> Build:
    folder, built = tmp_path_factory.mktemp("emulated"), {}

    def build(form: PackedForm, change: tuple[str, str] = ("", "")) -> ctypes.CDLL:
        name = f"kernel{built.setdefault((form, change), len(built))}"
        files = resources.files("vllm_cuda").joinpath("kernels")
        text = files.joinpath("packed_rows.cu").read_text(encoding="utf-8")
        assert change[0] in text
        kernel, library = folder / f"{name}.cu", folder / f"{name}.so"
        if not library.exists():
            kernel.write_text(text.replace(*change) if change[0] else text)
            defined = [option for option in rows_program(form, "sm_90").options if option.startswith("-D")]
            others = {"EPILOGUE_FILE": "epilogue.cuh", "PACKED_FILE": "packed.cuh", "WHOLE_KERNEL": "packed_whole.cu"}
            included = [f'-DKERNEL="{kernel}"', *(f'-D{word}="{files / file}"' for word, file in others.items())]
            flags = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC", *included]
            subprocess.run([str(COMPILER), *flags, *defined, str(EMULATOR), "-o", str(library)], check=True)
        return ctypes.CDLL(str(library))

    return build


def address(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


CASES = {
    "one warp": ("int8_channel", PackedTile(1, 1, 1, 1, 2, 1, True), 1, PLAIN, False, False),
    "four bits, parts, two groups of x": ("int4_group/128", PackedTile(2, 2, 1, 1, 3, 1), 2, ADD, True, False),
    "four bits in groups of 32, a gate in one warp": ("q4_0", PackedTile(1, 2, 2, 1, 2, 1), 1, GATED, True, False),
    "four bits in groups of 64, a float32 out": ("int4_group/64", PackedTile(1, 1, 2, 2, 4, 1, True), 1, PLAIN, False, True),
    "squares, a cluster and a gate in two warps": ("fp8_block128", PackedTile(2, 1, 1, 2, 3, 1, True), 1, GATED, False, False),
    "a scale a row, a cluster of parts": ("fp8_channel", PackedTile(1, 2, 1, 2, 2, 1), 3, ADD, True, False),
    "eight bits in groups of 32": ("q8_0", PackedTile(1, 2, 1, 1, 2, 1, True), 2, PLAIN, True, True),
}
SHAPES = ((3, 40, 128), (8, 32, 384), (1, 16, 640))
"""Rows of x, rows and columns of out and x; multiples of a record's 128, for groups of any size."""

RAGGED = (5, 19, 200)
"""Multiples of nothing, for formats without groups of inputs that must be whole."""

SCALED_BY_ROW = ("int8_channel", "fp8_channel", "fp8_block128")


def form_of(case: str, packed: Packed, half: bool) -> PackedForm:
    _, tile, groups, epilogue, with_bias, wide_out = CASES[case]
    return PackedForm(packed.layout, tile, groups, epilogue, 1 if epilogue == GATED else 0, with_bias, wide_out, half)


def is_right(
    build: Build, case: str, shape: tuple[int, int, int], seed: int, half: bool, change: tuple[str, str] = ("", "")
) -> bool:
    """Run it once; whether it ended, wrote what it should, and nothing else."""
    name, tile, _, epilogue, with_bias, wide_out = CASES[case]
    count, rows, columns = shape
    if epilogue == GATED:
        rows = -(-rows // 16) * 16
    halves, kind = (2 if epilogue == GATED else 1), torch.float16 if half else torch.bfloat16
    draw = torch.Generator().manual_seed(seed)
    weight = weight_of(name, halves * rows, columns, seed)
    bias = torch.randn(halves * rows, generator=draw).to(kind) if with_bias else None
    packed = pack(quant.pack(weight, bias, on="linear_pack"))
    assert isinstance(packed, Packed)
    form = form_of(case, packed, half)
    library = build(form, change)
    x = torch.randn(count, columns, generator=draw).to(kind)
    wanted = x.double() @ dequantize(weight).double().T
    if bias is not None:
        wanted += bias.double()
    whole = torch.full((count * rows + 2 * GUARD,), float("nan"), dtype=torch.float32 if wide_out else kind)
    out = whole[GUARD:-GUARD].view(count, rows)
    if epilogue == GATED:
        gate, up = wanted.chunk(2, 1)
        wanted = ACTIVATIONS[form.kind](gate) * up
    if epilogue == ADD:
        out.copy_(torch.randn(count, rows, generator=draw))
        wanted += out.double()
    programs = -(-rows // form.out_rows) * tile.cluster
    tensors = (packed.codes, packed.scales, packed.row_scale, x, out, packed.bias)
    stuck = library.run(*map(address, tensors), *shape[:1], rows, columns, form.shared_bytes, programs, seed)
    untouched = whole[:GUARD].isnan().all() and whole[-GUARD:].isnan().all()
    # Sums are float32; an out of 16 bits is rounded once.
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if wide_out else {"rtol": 4e-3, "atol": 1e-4}
    return not stuck and bool(untouched) and torch.allclose(out.double(), wanted, **tolerance)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("half", [False, True], ids=["bfloat16", "float16"])
def test_it_computes_the_product_in_whatever_order_threads_run(build, case, half):
    shapes = [*SHAPES, *([RAGGED] if CASES[case][0] in SCALED_BY_ROW else [])]
    assert [(shape, seed) for seed, shape in enumerate(shapes) if not is_right(build, case, shape, seed, half)] == []


@pytest.mark.parametrize(
    "change",
    [
        # A stage is read before all warps have brought their share of it.
        ("        barrier<SHARERS>(part + 1);\n", ""),
        # A copy is not waited for.
        ("wait_for_groups<STAGES - 2>", "wait_for_groups<STAGES - 1>"),
        # A stage is brought into the place of the one that is being read.
        ("int slot = 0, free = LAST;", "int slot = 0, free = 0;"),
        # Sums are put where a slower warp still reads its stage.
        ("    wait_for_groups<0>();\n    __syncthreads();\n", "    wait_for_groups<0>();\n"),
    ],
)
def test_the_emulator_finds_what_is_wrong(build, change):
    case = "four bits, parts, two groups of x"
    # Of seven records one part has four and the other three: it is done while the first is at its last.
    assert not all(is_right(build, case, (16, 32, 896), seed, False, change) for seed in range(4))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("half", [False, True], ids=["bfloat16", "float16"])
def test_a_widened_weight_has_the_decoded_ones_bits(build, case, half):
    name, kind = CASES[case][0], torch.float16 if half else torch.bfloat16
    rows, columns = RAGGED[1:] if name in SCALED_BY_ROW else SHAPES[1][1:]
    weight = weight_of(name, rows, columns, 3)
    packed = pack(quant.pack(weight, None, on="linear_pack"))
    assert packed is not None
    out = torch.full((rows, columns), float("nan"), dtype=kind)
    warps = -(-rows // 16) * -(-columns // 128)
    tensors = (packed.codes, packed.scales, packed.row_scale, out)
    build(form_of(case, packed, half)).widen_all(*map(address, tensors), rows, columns, -(-warps // 4))
    assert torch.equal(out, decode(weight, kind))
