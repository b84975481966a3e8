"""The product of few rows of Hopper: which shapes it takes, what it is compiled to, and how it is got ready."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from triton import knobs

from vllm_core.api import Accepted, CallSite, Rejected
from vllm_cuda import few_rows, linear, nvrtc, programs
from vllm_cuda.backends import families, hopper
from vllm_cuda.backends.offers import HOPPER_PROVIDER, _streamed, offers
from vllm_cuda.tiles import ADD, GATED, PLAIN, Form, Tile

MULTIPROCESSOR_BYTES, RESERVED_BYTES = 228 << 10, 1 << 10
"""Shared memory of a multiprocessor, and what each program on it takes beyond its own (CUDA C++ Programming Guide)."""

REGISTERS = 64 << 10

SHAPES = {
    "qkv": (6144, 4096, PLAIN),
    "o": (4096, 4096, ADD),
    "gate_up": (12288, 4096, GATED),
    "down": (4096, 12288, ADD),
    "half qkv": (3072, 4096, PLAIN),
    "half gate_up": (6144, 4096, GATED),
    "half down": (4096, 6144, PLAIN),
    "small qkv": (4096, 1024, PLAIN),
    "small o": (1024, 2048, ADD),
    "small gate_up": (3072, 1024, GATED),
}
"""Rows of out, columns of x, and what is done with the product, of Qwen3 8B, of its halves for two ranks, and of Qwen3 0.6B."""

LARGE = [name for name in SHAPES if not name.startswith("small")]

compiles = pytest.mark.skipif(not nvrtc.installed(), reason="needs NVRTC: pip install nvidia-cuda-nvrtc")


def form_of(name: str, count: int = 64) -> Form:
    rows, columns, epilogue = SHAPES[name]
    tile = hopper.streamed(count, rows, columns, epilogue == GATED, hopper.PROGRAMS)
    assert tile is not None, name
    return Form(tile=tile, bands=-(-count // 64), epilogue=epilogue, kind=0, bias=False, wide_out=False)


def dump(binary: bytes, folder: Path, option: str) -> str:
    file = folder / "kernel.cubin"
    file.write_bytes(binary)
    return subprocess.run([knobs.nvidia.cuobjdump.path, option, str(file)], capture_output=True, text=True, check=True).stdout


@pytest.fixture
def own_cache(tmp_path):
    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path)
        yield tmp_path


@pytest.mark.parametrize("name", LARGE)
def test_the_measured_shapes_are_taken_for_2_to_64_rows(name):
    assert form_of(name, 2).tile == form_of(name, 64).tile


@pytest.mark.parametrize("shape", [(4096, 2048, False), (3072, 1024, True), (151936, 4096, False), (75968, 4096, False)])
def test_shapes_at_which_it_was_not_faster_are_left_to_the_shared_kernel(shape):
    assert hopper.streamed(64, *shape, hopper.PROGRAMS) is None


@pytest.mark.parametrize("name", SHAPES)
def test_one_row_is_left_to_the_kernel_for_one_row(name):
    rows, columns, epilogue = SHAPES[name]
    assert hopper.streamed(1, rows, columns, epilogue == GATED, hopper.PROGRAMS) is None


@pytest.mark.parametrize(
    ("name", "most"),
    [("gate_up", 256), ("o", 192), ("qkv", 160), ("small gate_up", 256), ("small o", 128), ("small qkv", 128)],
)
def test_more_than_64_rows_are_taken_as_long_as_it_was_faster(name, most):
    rows, columns, epilogue = SHAPES[name]
    assert form_of(name, 65).bands == 2
    assert form_of(name, most).bands == -(-most // 64)
    assert hopper.streamed(most + 1, rows, columns, epilogue == GATED, hopper.PROGRAMS) is None


def test_what_fits_cublas_tiles_of_160_rows_is_left_to_it():
    taken = {count for count in range(65, 257) if hopper.streamed(count, 4096, 12288, False, hopper.PROGRAMS) is not None}
    assert taken == {*range(65, 129), *range(161, 193)}
    half = {count for count in range(65, 257) if hopper.streamed(count, 4096, 6144, False, hopper.PROGRAMS) is not None}
    assert half == {*range(65, 129), *range(161, 257)}


@pytest.mark.parametrize("multiprocessors", [1, 78, 114])
def test_chips_on_which_its_programs_were_not_one_wave_keep_the_shared_kernel(multiprocessors):
    assert hopper.streamed(64, 6144, 4096, False, multiprocessors) is None


@given(st.integers(0, 300), st.integers(1, 40000), st.integers(1, 40000), st.booleans())
@example(64, 11200, 12000, False)
def test_every_tile_is_one_wave_of_whole_groups_within_the_chips_memory(count, rows, columns, gated):
    tile = hopper.streamed(count, rows, columns, gated, hopper.PROGRAMS)
    if tile is None:
        return
    halves = 2 if gated else 1
    groups, rest = divmod(tile.rows, 8)
    assert rest == 0
    assert groups % (halves * tile.cluster) == 0
    assert tile.rows <= 256
    bands = max(1, -(-count // 64))
    clusters = -(-rows * halves // tile.rows)
    # A gate's tiles are half as large for four bands: two waves.
    waves = 2 if bands == 4 and tile.cluster == 1 else 1
    assert clusters <= waves * {1: hopper.PROGRAMS, **hopper.CLUSTERS}[tile.cluster]
    form = Form(tile, bands, GATED if gated else PLAIN, 0, False, False)
    assert form.shared_bytes <= families.HOPPER.shared_bytes
    assert tile.stages >= hopper.LEAST_STAGES


def test_a_product_and_the_one_that_follows_it_share_a_multiprocessor_and_no_product_shares_one_with_itself():
    wide = [form_of(name).shared_bytes + RESERVED_BYTES for name in ("qkv", "o", "gate_up")]
    narrow = form_of("down").shared_bytes + RESERVED_BYTES
    assert max(wide) + narrow + RESERVED_BYTES <= MULTIPROCESSOR_BYTES, "and there is room for a norm"
    assert 2 * min(wide) > MULTIPROCESSOR_BYTES


FORMS_OF_MORE = [
    *(("gate_up", count) for count in (128, 192, 256)),
    *((name, 128) for name in ("qkv", "down", "small qkv", "small o", "small gate_up")),
    *(("o", count) for count in (128, 192)),
]


@compiles
@pytest.mark.parametrize(("name", "count"), [*((name, 64) for name in LARGE), *FORMS_OF_MORE])
def test_it_compiles_to_matrix_instructions_without_spills(name, count, tmp_path):
    form = form_of(name, count)
    binary = few_rows.program_of(form).binary()
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", dump(binary, tmp_path, "--dump-resource-usage"))
    assert found is not None
    registers, stack, _ = map(int, found.groups())
    assert stack == 0
    # That of a narrow product has room beside it, and both have it beside a norm of 16 warps.
    assert registers * form.threads <= REGISTERS // (1 if form.bands > 1 else 2)
    instructions = dump(binary, tmp_path, "--dump-sass")
    assert f"HGMMA.64x{form.tile.rows}x16.F32.BF16" in instructions
    assert all(word in instructions for word in ("UTMALDG.2D", "PREEXIT", "ACQBULK"))


@compiles
@pytest.mark.parametrize(("epilogue", "kind", "wide_out"), [*((GATED, kind, False) for kind in range(4)), (PLAIN, 0, True)])
def test_each_activation_a_bias_and_a_float32_out_compile(epilogue, kind, wide_out):
    form = Form(form_of("half gate_up").tile, 1, epilogue, kind, True, wide_out)
    assert few_rows.program_of(form).binary()


@compiles
def test_a_refused_source_shows_the_compilers_log():
    with pytest.raises(nvrtc.CompileError, match="nonsense"):
        nvrtc.compiled("nonsense;", ("--gpu-architecture=sm_90a",))


@compiles
def test_a_rehearsal_compiles_and_launches_nothing(own_cache):
    form = form_of("half qkv")
    weight, x, out = (torch.zeros(shape, dtype=torch.bfloat16) for shape in ((3072, 4096), (8, 4096), (8, 3072)))
    with programs.rehearsal():
        few_rows.launch(out, x, weight, None, form, hopper.PROGRAMS)
        few_rows.launch(out, x, weight, None, form, hopper.PROGRAMS)
    (file,) = own_cache.rglob("*.cubin")
    written = file.stat().st_mtime_ns
    assert few_rows.program_of(form).binary() == file.read_bytes()
    assert file.stat().st_mtime_ns == written, "what is in the cache is not compiled again"


@compiles
def test_a_rehearsal_survives_what_cannot_be_compiled(own_cache, caplog):
    caplog.set_level("INFO")
    weight, x = torch.zeros(64, 64, dtype=torch.bfloat16), torch.zeros(1, 64, dtype=torch.bfloat16)
    uneven = Form(Tile(rows=20, cluster=1, stages=2, x_stages=2), 1, PLAIN, 0, False, False)
    with programs.rehearsal():
        few_rows.launch(x, x, weight, None, uneven, hopper.PROGRAMS)
    assert "not compiled ahead" in caplog.text
    assert "a slice is of whole groups" in caplog.text


def site(**changes) -> CallSite:
    return CallSite(**{"op": "linear", "role": "linear", "dtype": "bfloat16", **changes})


def test_it_is_offered_on_hopper_before_the_shared_products(make_facts):
    mine, *others = (one for one in offers(make_facts("sm_90")) if "linear" in one.ops)
    assert mine.provider == HOPPER_PROVIDER
    assert mine.priority > max(one.priority for one in others)
    for other in families.ARCHITECTURES:
        if other != "sm_90":
            assert HOPPER_PROVIDER not in {one.provider for one in offers(make_facts(other))}


@pytest.mark.parametrize("changes", [{"dtype": "float32"}, {"format": "int8_channel"}])
def test_other_dtypes_and_formats_are_rejected(changes):
    assert isinstance(_streamed(True).judge(site(**changes), "sm_90"), Rejected)


def test_without_a_compiler_it_is_rejected_with_the_reason():
    assert isinstance(_streamed(True).judge(site(), "sm_90"), Accepted)
    verdict = _streamed(False).judge(site(), "sm_90")
    assert isinstance(verdict, Rejected)
    assert "NVRTC" in str(verdict)


@pytest.mark.parametrize(
    ("weight", "bias", "streamable"),
    [
        (torch.zeros(64, 64, dtype=torch.bfloat16), None, True),
        (torch.zeros(64, 64, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.bfloat16), True),
        (torch.zeros(64, 64, dtype=torch.bfloat16), torch.zeros(64), False),
        (torch.zeros(64, 64, dtype=torch.bfloat16), torch.zeros(65, dtype=torch.bfloat16)[1:], False),
        (torch.zeros(64, 64, dtype=torch.bfloat16), torch.zeros(128, dtype=torch.bfloat16)[::2], False),
        (torch.zeros(64, 64, dtype=torch.float16), None, True),
        (torch.zeros(64, 64, dtype=torch.float16), torch.zeros(64, dtype=torch.bfloat16), False),
        (torch.zeros(64, 64), None, False),
        (torch.zeros(60, 64, dtype=torch.bfloat16), None, False),
        (torch.zeros(64, 60, dtype=torch.bfloat16), None, False),
        (torch.zeros(64 * 64 + 1, dtype=torch.bfloat16)[1:].view(64, 64), None, False),
    ],
)
def test_weights_that_bulk_copies_cannot_read_are_known_when_they_are_packed(weight, bias, streamable):
    assert linear.linear_pack(weight, bias, ()).streamable is streamable
