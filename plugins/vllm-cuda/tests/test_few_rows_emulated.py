"""The product of few rows of Hopper on the host (`emulated_few_rows.cpp`): its ring, its clusters and what it writes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from vllm_cuda.few_rows import program_of
from vllm_cuda.tiles import ADD, GATED, PLAIN, Form, Tile

FILES = ("epilogue.cuh", "few_rows.cu")

FORMS = {
    "several tiles a program": Form(Tile(64, 64, 1, 3, True), PLAIN, 0, True),
    "stages that are given back at once": Form(Tile(128, 32, 2, 4, False), PLAIN, 0, True),
    "three parts of K and a residual": Form(Tile(128, 48, 3, 2, True), ADD, 0, False),
    "two parts and a gate": Form(Tile(64, 32, 2, 2, True), GATED, 1, True),
    "one part and a residual": Form(Tile(64, 16, 1, 3, False), ADD, 0, True),
    "fewer rows of the weight than two groups have": Form(Tile(80, 32, 2, 3, True), ADD, 0, True),
    "fewer rows of a gate": Form(Tile(48, 32, 1, 3, True), GATED, 0, True),
    "more rows than one instruction takes": Form(Tile(192, 224, 1, 2, True), GATED, 0, False),
}
SHAPES = ((5, 24, 200), (40, 200, 136), (33, 328, 320), (1, 8, 8))
"""Rows of x, rows and columns of the weight: multiples of no tile, and less than one."""

ACTIVATIONS = (functional.silu, functional.gelu)
GUARD = 64
"""Elements around what is written, which must stay as they are."""

Build = Callable[..., ctypes.CDLL]


@pytest.fixture(scope="session")
def build(emulate) -> Build:
    def build(form: Form, change: tuple[str, str] = ("", "")) -> ctypes.CDLL:
        return emulate("few_rows", FILES, program_of(form).options, change, level="-O1")

    return build


def address(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def is_right(library: ctypes.CDLL, form: Form, shape: tuple[int, int, int], seed: int) -> bool:
    """Run it once; whether it ended, wrote what it should, and nothing else."""
    count, rows, columns = shape
    halves = 2 if form.epilogue == GATED else 1
    draw = torch.Generator().manual_seed(seed)
    weight = (torch.randn(halves * rows, columns, generator=draw) * columns**-0.5).bfloat16()
    x = torch.randn(count, columns, generator=draw).bfloat16()
    bias = torch.randn(halves * rows, generator=draw).bfloat16() if form.bias else None
    whole = torch.full((count * rows + 2 * GUARD,), float("nan"), dtype=torch.bfloat16)
    out = whole[GUARD:-GUARD].view(count, rows)
    wanted = x.float() @ weight.float().T
    if bias is not None:
        wanted += bias.float()
    if form.epilogue == GATED:
        gate, up = wanted.chunk(2, 1)
        wanted = ACTIVATIONS[form.kind](gate) * up
    if form.epilogue == ADD:
        out.copy_(torch.randn(count, rows, generator=draw))
        wanted += out.float()
    tiles = -(-rows * halves // form.tile.rows) * -(-count // form.tile.tokens)
    programs = tiles * form.tile.parts if form.tile.parts > 1 else min(tiles, 2)
    sizes = (*shape, form.shared_bytes, programs, seed)
    stuck = library.run(address(weight), address(x), address(out), address(bias), *sizes)
    untouched = whole[:GUARD].isnan().all() and whole[-GUARD:].isnan().all()
    return not stuck and bool(untouched) and torch.allclose(out.float(), wanted, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("name", FORMS)
def test_it_computes_the_product_in_whatever_order_threads_run_and_copies_arrive(build, name):
    library = build(FORMS[name])
    assert [(shape, seed) for seed, shape in enumerate(SHAPES) if not is_right(library, FORMS[name], shape, seed)] == []


@pytest.mark.parametrize(
    ("change", "name", "columns"),
    [
        # A stage is given back before it has been multiplied.
        (("wait_for_groups_of_products<LATE>()", "wait_for_groups_of_products<2>()"), "three parts of K and a residual", 1200),
        (
            ("wait_for_groups_of_products<LATE>()", "wait_for_groups_of_products<1>()"),
            "stages that are given back at once",
            1216,
        ),
        # Sums of the tile before are not forgotten.
        (("index > 0 || k > 0", "true"), "several tiles a program", 200),
        # Parts are added before all of them have come.
        (("            barrier_wait(all_given, 0);\n", ""), "stages that are given back at once", 64),
    ],
)
def test_the_emulator_finds_what_is_wrong(build, change, name, columns):
    library = build(FORMS[name], change)
    assert not all(is_right(library, FORMS[name], (40, 328, columns), seed) for seed in range(4))
