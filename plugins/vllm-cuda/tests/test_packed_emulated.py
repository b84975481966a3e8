"""Products with a packed weight on the host (`emulated_packed_rows.cpp`, `emulated_packed_wide.cpp`): layout, rings, clusters
and sums, without a GPU."""

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
from vllm_cuda.packed_tiles import PackedForm, PackedTile, WideForm, WideTile
from vllm_cuda.packed_wide import program_of
from vllm_cuda.programs import Program
from vllm_cuda.tiles import ADD, GATED, PLAIN
from vllm_triton.ops import quant

COMPILER = shutil.which(os.environ.get("CXX", "c++"))

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

INCLUDED = {
    "EPILOGUE_FILE": "epilogue.cuh",
    "PACKED_FILE": "packed.cuh",
    "FINISH_FILE": "packed_finish.cuh",
    "WHOLE_KERNEL": "packed_whole.cu",
}

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

    def build(program: Program, change: tuple[str, str] = ("", "")) -> ctypes.CDLL:
        name = f"kernel{built.setdefault((program, change), len(built))}"
        files = resources.files("vllm_cuda").joinpath("kernels")
        text = files.joinpath(f"{program.function}.cu").read_text(encoding="utf-8")
        assert change[0] in text
        kernel, library = folder / f"{name}.cu", folder / f"{name}.so"
        if not library.exists():
            kernel.write_text(text.replace(*change) if change[0] else text)
            defined = [option for option in program.options if option.startswith("-D")]
            included = [f'-DKERNEL="{kernel}"', *(f'-D{word}="{files / file}"' for word, file in INCLUDED.items())]
            flags = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC", *included]
            emulator = str(Path(__file__).with_name(f"emulated_{program.function}.cpp"))
            subprocess.run([str(COMPILER), *flags, *defined, emulator, "-o", str(library)], check=True)
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
WIDE_CASES = {
    "one group of warps": ("int8_channel", WideTile(1, 1, 1, 1, 2), 0, PLAIN, False, False),
    "four bits, two shares": ("int4_group/128", WideTile(1, 1, 2, 2, 2), 0, ADD, True, False),
    "four bits in groups of 64, two bands, a float32 out": ("int4_group/64", WideTile(1, 2, 1, 1, 3), 0, PLAIN, False, True),
    "four bits in groups of 32, two groups of warps and a gate": ("q4_0", WideTile(2, 1, 3, 1, 2), 0, GATED, True, False),
    "squares, two bands and a gate in three shares": ("fp8_block128", WideTile(1, 2, 1, 3, 2), 0, GATED, False, False),
    "a scale a row, two groups of warps": ("fp8_channel", WideTile(2, 1, 2, 1, 4), 0, ADD, True, False),
    "eight bits in groups of 32, more rows of x": ("q8_0", WideTile(1, 1, 3, 1, 2), 0, PLAIN, True, True),
}
"""Format, tile, groups of eight rows of x where the tile does not say it, epilogue, bias, a float32 out."""

ALL_CASES = CASES | WIDE_CASES
SHAPES = ((3, 40, 128), (8, 32, 384), (1, 16, 640))
"""Rows of x, rows and columns of out and x; multiples of a record's 128, for groups of any size."""

WIDE_SHAPES = ((3, 40, 128), (13, 80, 640))

RAGGED = (5, 19, 200)
"""Multiples of nothing, for formats without groups of inputs that must be whole."""

SCALED_BY_ROW = ("int8_channel", "fp8_channel", "fp8_block128")


def form_of(case: str, packed: Packed, half: bool) -> PackedForm | WideForm:
    _, tile, groups, epilogue, with_bias, wide_out = ALL_CASES[case]
    kind = 1 if epilogue == GATED else 0
    if isinstance(tile, WideTile):
        return WideForm(packed.layout, tile, epilogue, kind, with_bias, wide_out, half)
    return PackedForm(packed.layout, tile, groups, epilogue, kind, with_bias, wide_out, half)


def program(form: PackedForm | WideForm) -> Program:
    return program_of(form) if isinstance(form, WideForm) else rows_program(form, "sm_90")


def is_right(
    build: Build, case: str, shape: tuple[int, int, int], seed: int, half: bool, change: tuple[str, str] = ("", "")
) -> bool:
    """Run it once; whether it ended, wrote what it should, and nothing else."""
    name, tile, _, epilogue, with_bias, wide_out = ALL_CASES[case]
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
    library = build(program(form), change)
    x = torch.randn(count, columns, generator=draw).to(kind)
    wide = isinstance(form, WideForm)
    # Of many groups scales are multiplied into numbers there, as when the weight is widened alone.
    widened = wide and packed.layout.sets * tile.columns > 8
    numbers = decode(weight, kind) if widened else dequantize(weight)
    wanted = x.double() @ numbers.double().T
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
    spans = -(-count // (8 * tile.columns)) if wide else 1
    programs = -(-rows // form.out_rows) * spans * (tile.shares if wide else tile.cluster)
    tensors = (packed.codes, packed.scales, packed.row_scale, x, out, packed.bias)
    stuck = library.run(*map(address, tensors), *shape[:1], rows, columns, form.shared_bytes, programs, seed)
    untouched = whole[:GUARD].isnan().all() and whole[-GUARD:].isnan().all()
    # Sums are float32; an out of 16 bits is rounded once.
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if wide_out else {"rtol": 4e-3, "atol": 1e-4}
    if widened:
        # Of two numbers that are as near the other one may be taken.
        tolerance["atol"] = 1e-3
    return not stuck and bool(untouched) and torch.allclose(out.double(), wanted, **tolerance)


@pytest.mark.parametrize("case", ALL_CASES)
@pytest.mark.parametrize("half", [False, True], ids=["bfloat16", "float16"])
def test_it_computes_the_product_in_whatever_order_threads_run_and_copies_arrive(build, case, half):
    shapes = [*(WIDE_SHAPES if case in WIDE_CASES else SHAPES), *([RAGGED] if ALL_CASES[case][0] in SCALED_BY_ROW else [])]
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
def test_the_emulator_of_few_rows_finds_what_is_wrong(build, change):
    case = "four bits, parts, two groups of x"
    # Of seven records one part has four and the other three: it is done while the first is at its last.
    assert not all(is_right(build, case, (16, 32, 896), seed, False, change) for seed in range(4))


@pytest.mark.parametrize(
    "change",
    [
        # A stage is given back while products still read it.
        ("wait_for_groups_of_products<1>();", ""),
        # A stage is brought into a place that is not free.
        ("barrier_wait(rings.empty + slot * 8, phase);", ""),
        # A stage is read before x has come.
        ("        arrive_with_copies(rings.full + slot * 8);\n", "        barrier_arrive(rings.full + slot * 8);\n"),
        # Sums are put where a slower group still reads its stage.
        ("    barrier<WORKERS>(1);\n    constexpr int PART", "    constexpr int PART"),
    ],
)
def test_the_emulator_of_many_rows_finds_what_is_wrong(build, change):
    case = "a scale a row, two groups of warps"
    assert not all(is_right(build, case, (16, 128, 1152), seed, False, change) for seed in range(12))


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
    build(program(form_of(case, packed, half))).widen_all(*map(address, tensors), rows, columns, -(-warps // 4))
    assert torch.equal(out, decode(weight, kind))
