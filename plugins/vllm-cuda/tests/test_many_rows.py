"""The product of many rows of Hopper: which shapes it takes, what it is compiled to, and when it is launched."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from triton import knobs

from vllm_core.api import Accepted, CallSite
from vllm_cuda import few_rows, linear, many_rows, nvrtc
from vllm_cuda.backends import families, hopper
from vllm_cuda.backends.offers import _streamed
from vllm_cuda.many_tiles import BOX_COLUMNS, CLUSTER, LEAD, LINES, THREADS, ManyForm, clusters_of
from vllm_cuda.tiles import ADD, GATED, PLAIN
from vllm_triton import tuning
from vllm_triton.ops import linear as shared

REGISTERS = 64 << 10

GATES = {"8B": (12288, 4096), "0.6B": (3072, 1024)}
"""Rows of out and columns of x of the gated MLP of Qwen3."""

FORMS = [
    *(ManyForm(256, epilogue, 0, epilogue != GATED, False) for epilogue in (PLAIN, ADD, GATED)),
    *(ManyForm(256, GATED, kind, True, True) for kind in range(4)),
    ManyForm(128, GATED, 0, True, False),
    ManyForm(192, ADD, 0, True, True),
]

compiles = pytest.mark.skipif(not nvrtc.installed(), reason="needs NVRTC: pip install nvidia-cuda-nvrtc")


def dump(binary: bytes, folder: Path, option: str) -> str:
    file = folder / "kernel.cubin"
    file.write_bytes(binary)
    return subprocess.run([knobs.nvidia.cuobjdump.path, option, str(file)], capture_output=True, text=True, check=True).stdout


@compiles
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_it_compiles_to_matrix_instructions_and_bulk_stores_without_spills(form, tmp_path):
    binary = many_rows.program_of(form).binary()
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", dump(binary, tmp_path, "--dump-resource-usage"))
    assert found is not None
    registers, stack, _ = map(int, found.groups())
    assert stack == 0
    assert -(-registers // 8) * 8 * THREADS <= REGISTERS
    instructions = dump(binary, tmp_path, "--dump-sass")
    number = "" if form.half else ".BF16"
    # One a step of 16 columns of a stage: the loop over stages is not unrolled, and nothing is multiplied twice.
    assert instructions.count(f"HGMMA.64x{form.rows}x16.F32{number}") == 4
    words = ("UTMALDG.2D.MULTICAST", "UTMAREDG.2D.ADD" if form.epilogue == ADD else "UTMASTG.2D", "STSM", "PREEXIT", "ACQBULK")
    assert all(word in instructions for word in words)
    # What is given back to another program is ordered by the products alone: no barrier of memory between stages.
    loop = instructions[instructions.index("HGMMA") : instructions.rindex("HGMMA")]
    assert "MEMBAR" not in loop


@pytest.mark.parametrize("rows", [128, 192, 256])
def test_a_ring_takes_what_shared_memory_a_program_can_have(rows):
    form = ManyForm(rows, PLAIN, 0, False, False)
    assert form.shared_bytes <= families.HOPPER.shared_bytes
    assert form.shared_bytes + (LINES + rows) * 128 > families.HOPPER.shared_bytes
    assert form.stages > LEAD


@given(st.integers(1, 20000), st.integers(1, 40000), st.sampled_from([128, 192, 256]), st.integers(2, 200))
def test_clusters_are_as_few_as_take_no_longer_than_all_would(count, weight_rows, tile_rows, multiprocessors):
    tiles = -(-count // (CLUSTER * LINES)) * -(-weight_rows // tile_rows)
    most = multiprocessors // CLUSTER
    found = clusters_of(count, weight_rows, tile_rows, multiprocessors)
    assert 1 <= found <= min(tiles, most)
    waves = -(-tiles // most)
    assert -(-tiles // found) == waves
    assert found == 1 or -(-tiles // (found - 1)) > waves


def taken(count: int, rows: int, columns: int) -> bool:
    return hopper.many(count, rows, columns, True, False, hopper.PROGRAMS) is not None


@pytest.mark.parametrize("model", GATES)
def test_gates_of_prompts_are_taken(model):
    assert all(taken(count, *GATES[model]) for count in (2048, 4096, 8192, 8229, 16384))


def test_what_leaves_programs_idle_is_left_to_cublas():
    assert taken(512, *GATES["8B"])
    assert not taken(384, *GATES["8B"])
    assert not taken(300, *GATES["0.6B"])
    assert hopper.many(1024, 4608, 3584, False, True, hopper.PROGRAMS) is None


@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 1024), (4096, 4096)])
def test_without_a_gate_it_takes_what_has_a_bias_alone(shape):
    assert hopper.many(8192, *shape, False, True, hopper.PROGRAMS) is not None
    assert hopper.many(8192, *shape, False, False, hopper.PROGRAMS) is None


@pytest.mark.parametrize("multiprocessors", [1, 78, 114])
def test_chips_that_it_was_not_measured_on_keep_cublas(multiprocessors):
    assert hopper.many(8192, *GATES["8B"], True, False, multiprocessors) is None


@given(st.integers(0, 20000), st.integers(1, 70000), st.integers(1, 20000), st.booleans(), st.booleans())
def test_no_product_is_taken_by_both_kernels_and_every_tile_is_one_that_compiles(count, rows, columns, gated, biased):
    tile = hopper.many(count, rows, columns, gated, biased, hopper.PROGRAMS)
    if tile is None:
        return
    assert hopper.streamed(count, rows, columns, gated, hopper.PROGRAMS) is None
    assert tile.rows % (2 * BOX_COLUMNS) == 0
    assert 1 <= tile.height <= -(-count // (CLUSTER * LINES))


@pytest.fixture
def launches(monkeypatch) -> list[str]:
    """What is launched on an H200: by which kernel, or as which of the shared products."""
    seen: list[str] = []
    for module, name in ((few_rows, "launch"), (many_rows, "launch"), (shared, "gated_linear"), (shared, "linear_add")):
        label = f"{module.__name__.rsplit('.', 1)[1]}.{name}"
        monkeypatch.setattr(module, name, lambda *arguments, label=label: seen.append(label))
    monkeypatch.setattr(tuning, "_active", [])
    tuning.use(hopper.TUNING, hopper.PROGRAMS)
    return seen


@pytest.mark.parametrize(
    ("count", "dtype", "seen"),
    [
        (128, torch.bfloat16, "few_rows.launch"),
        (512, torch.bfloat16, "many_rows.launch"),
        (512, torch.float16, "many_rows.launch"),
        (300, torch.bfloat16, "linear.gated_linear"),
        (128, torch.float16, "linear.gated_linear"),
    ],
)
def test_a_gate_is_launched_by_the_number_of_rows(launches, count, dtype, seen):
    rows, columns = GATES["8B"]
    weight = linear.linear_pack(torch.empty(2 * rows, columns, dtype=dtype), None, ())
    x, out = torch.empty(count, columns, dtype=dtype), torch.empty(count, rows, dtype=dtype)
    linear.gated_linear(out, torch.empty(count, 2 * rows, dtype=dtype), x, weight, "silu")
    assert launches == [seen]


def test_a_bias_is_taken_along_to_a_residual(launches):
    weight, bias = torch.empty(4096, 4096, dtype=torch.bfloat16), torch.empty(4096, dtype=torch.bfloat16)
    x = torch.empty(8192, 4096, dtype=torch.bfloat16)
    for one in (bias, None):
        linear.linear_add(torch.empty_like(x), torch.empty_like(x), x, linear.linear_pack(weight, one, ()))
    assert launches == ["many_rows.launch", "linear.linear_add"]


def test_rows_of_another_dtype_or_that_copies_cannot_read_go_another_way(launches):
    rows, columns = GATES["8B"]
    weight = linear.linear_pack(torch.empty(2 * rows, columns, dtype=torch.bfloat16), None, ())
    x, out = torch.empty(512, columns, dtype=torch.bfloat16), torch.empty(512, rows, dtype=torch.bfloat16)
    wide = torch.empty(512, 2 * rows, dtype=torch.bfloat16)
    linear.gated_linear(out, wide, x.half(), weight, "silu")
    linear.gated_linear(out, wide, x.new_empty(columns, 512).t(), weight, "silu")
    linear.gated_linear(out.float(), wide, x, weight, "silu")
    assert launches == ["linear.gated_linear"] * 3


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_both_dtypes_of_16_bits_are_offered(dtype):
    site = CallSite(op="gated_linear", role="linear", dtype=dtype)
    assert isinstance(_streamed(True).judge(site, "sm_90"), Accepted)
