"""The product of many rows of Hopper on the host (`emulated_many_rows.cpp`): its ring, its clusters and what it writes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from vllm_cuda.many_rows import program_of
from vllm_cuda.many_tiles import ManyForm
from vllm_cuda.tiles import ADD, GATED, PLAIN

FILES = ("epilogue.cuh", "many_rows.cu")

FORMS = {
    "a bias": ManyForm(128, PLAIN, 0, True, False),
    "added": ManyForm(64, ADD, 0, False, False),
    "a gate with a bias": ManyForm(128, GATED, 1, True, False),
    "the widest": ManyForm(256, PLAIN, 0, False, False),
}
STAGES = 3
SHAPES = ((300, 200, 456), (600, 72, 200), (1, 8, 8))
"""Rows of x, rows and columns of the weight: multiples of no tile, and less than one."""

ACTIVATIONS = (functional.silu, functional.gelu)
GUARD = 64
"""Elements around what is written, which must stay as they are."""

Build = Callable[..., ctypes.CDLL]


@pytest.fixture(scope="session")
def build(emulate) -> Build:
    def build(form: ManyForm, change: tuple[str, str] = ("", "")) -> ctypes.CDLL:
        # Fewer stages than fit come into use again sooner.
        return emulate("many_rows", FILES, (*program_of(form).options, f"-DSTAGES={STAGES}"), change)

    return build


def address(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def is_right(library: ctypes.CDLL, form: ManyForm, shape: tuple[int, int, int], seed: int) -> bool:
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
    # Two clusters for all tiles.
    stuck = library.run(*map(address, (weight, x, out, bias)), *shape, form.shared_bytes, 4, 1 + seed % 2, seed)
    untouched = whole[:GUARD].isnan().all() and whole[-GUARD:].isnan().all()
    return not stuck and bool(untouched) and torch.allclose(out.float(), wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", FORMS)
def test_it_computes_the_product_in_whatever_order_threads_run_and_copies_arrive(build, name):
    library = build(FORMS[name])
    assert [(shape, seed) for seed, shape in enumerate(SHAPES) if not is_right(library, FORMS[name], shape, seed)] == []


@pytest.mark.parametrize(
    ("change", "name", "shape"),
    [
        # A stage is given back while it may still be multiplied.
        (("wait_for_groups_of_products<1>()", "wait_for_groups_of_products<2>()"), "a bias", SHAPES[0]),
        # Only this program's threads give back what both bring.
        (("(ring.empty + i * 8, CLUSTER * WORKERS / 32)", "(ring.empty + i * 8, WORKERS / 32)"), "a bias", SHAPES[0]),
        # A box is filled again before it has been taken.
        (("wait_for_takes<BOXES - 1>()", "wait_for_takes<BOXES>()"), "the widest", (200, 256, 64)),
        # A warp leaves before its boxes have been taken.
        (("wait_for_takes<0>()", "wait_for_takes<1>()"), "a bias", SHAPES[0]),
        # Sums of the tile before are not forgotten.
        (("step > 0 || k > 0", "true"), "a bias", SHAPES[0]),
    ],
)
def test_the_emulator_finds_what_is_wrong(build, change, name, shape):
    library = build(FORMS[name], change)
    assert not all(is_right(library, FORMS[name], shape, seed) for seed in range(4))
