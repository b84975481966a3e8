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

REGISTERS_OF_A_QUARTER, QUARTERS = 16 << 10, 4
"""Of a multiprocessor, whose warps are spread over its quarters (CUDA C++ Programming Guide)."""

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
    "small down": (1024, 3072, ADD),
}
"""Rows of out, columns of x, and what is done with the product, of Qwen3 8B, of its halves for two ranks, and of Qwen3 0.6B."""

LARGE = [name for name in SHAPES if not name.startswith("small")]

compiles = pytest.mark.skipif(not nvrtc.installed(), reason="needs NVRTC: pip install nvidia-cuda-nvrtc")


def form_of(name: str, count: int = 64) -> Form:
    rows, columns, epilogue = SHAPES[name]
    tile = hopper.streamed(count, rows, columns, epilogue == GATED, hopper.PROGRAMS)
    assert tile is not None, name
    return Form(tile=tile, epilogue=epilogue, kind=0, bias=False)


def dump(binary: bytes, folder: Path, option: str) -> str:
    file = folder / "kernel.cubin"
    file.write_bytes(binary)
    return subprocess.run([knobs.nvidia.cuobjdump.path, option, str(file)], capture_output=True, text=True, check=True).stdout


@pytest.fixture
def own_cache(tmp_path):
    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path)
        yield tmp_path


@pytest.mark.parametrize("name", SHAPES)
def test_all_numbers_of_rows_at_which_it_was_faster_are_taken(name):
    rows, columns, epilogue = SHAPES[name]
    taken = [count for count in range(1025) if hopper.streamed(count, rows, columns, epilogue == GATED, hopper.PROGRAMS)]
    most = 256 if name in ("o", "gate_up", "down", "half qkv", "half down") else 224
    assert taken == list(range(2, most + 1))


@pytest.mark.parametrize("shape", [(1024, 1024, False), (151936, 4096, False), (17408, 5120, True)])
def test_shapes_that_it_was_not_measured_with_are_left_to_others(shape):
    assert hopper.streamed(64, *shape, hopper.PROGRAMS) is None


@pytest.mark.parametrize("name", SHAPES)
def test_one_row_is_left_to_the_kernel_for_one_row(name):
    rows, columns, epilogue = SHAPES[name]
    assert hopper.streamed(1, rows, columns, epilogue == GATED, hopper.PROGRAMS) is None


def test_so_many_rows_that_whole_groups_leave_programs_idle_have_tiles_with_fewer_rows():
    tile = hopper.streamed(64, 5120, 17408, False, hopper.PROGRAMS)
    assert tile is not None
    assert (tile.rows, tile.groups, 5120 // tile.rows * tile.parts) == (80, 2, 128)
    assert hopper.streamed(129, 5120, 17408, False, hopper.PROGRAMS) is None, "they cost the matrix units as much as others"


@pytest.mark.parametrize("multiprocessors", [1, 78, 114])
def test_chips_on_which_its_programs_were_not_one_wave_keep_the_shared_kernel(multiprocessors):
    assert hopper.streamed(64, 6144, 4096, False, multiprocessors) is None


@given(st.integers(0, 300), st.integers(1, 40000), st.integers(1, 40000), st.booleans())
@example(256, 4096, 4096, False)
@example(224, 6144, 4096, True)
def test_every_tile_is_one_wave_of_whole_slices_within_the_chips_memory(count, rows, columns, gated):
    tile = hopper.streamed(count, rows, columns, gated, hopper.PROGRAMS)
    if tile is None:
        return
    halves = 2 if gated else 1
    assert tile.rows % 16 == 0
    assert tile.tokens % (8 * tile.parts) == 0
    assert count <= tile.tokens * 2
    assert tile.tokens <= 256
    clusters = -(-rows * halves // tile.rows) * -(-count // tile.tokens)
    assert clusters <= hopper.CLUSTERS[tile.parts]
    assert Form(tile, GATED if gated else PLAIN, 0, False).shared_bytes <= families.HOPPER.shared_bytes
    assert tile.stages > tile.late


FORMS = [
    *((name, 64) for name in SHAPES),
    *((name, count) for name in ("qkv", "o", "gate_up") for count in (16, 128, 192, 224)),
    *((name, 256) for name in ("o", "gate_up")),
    *(("small o", 224), ("small gate_up", 224), ("half gate_up", 224)),
]


@compiles
@pytest.mark.parametrize(("name", "count"), FORMS)
def test_it_compiles_to_matrix_instructions_without_spills(name, count, tmp_path):
    form = form_of(name, count)
    binary = few_rows.program_of(form).binary()
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", dump(binary, tmp_path, "--dump-resource-usage"))
    assert found is not None
    registers, stack, _ = map(int, found.groups())
    assert stack == 0
    warps = -(-form.threads // 32 // QUARTERS)
    assert registers * 32 * warps <= REGISTERS_OF_A_QUARTER
    instructions = dump(binary, tmp_path, "--dump-sass")
    assert f"HGMMA.64x{form.tile.tokens // form.tile.products}x16.F32.BF16" in instructions
    assert all(word in instructions for word in ("UTMALDG", "PREEXIT", "ACQBULK"))
    assert ("USETMAXREG" in instructions) is form.tile.trade


@compiles
@pytest.mark.parametrize("kind", range(4))
def test_each_activation_and_a_bias_compile(kind):
    assert few_rows.program_of(Form(form_of("half gate_up").tile, GATED, kind, True)).binary()


@compiles
@pytest.mark.parametrize(
    ("tile", "reason"),
    [(Tile(64, 24, 2, 4, True), "a slice is of whole groups"), (Tile(64, 32, 2, 1, True), "a stage is held while")],
)
def test_tiles_that_cannot_work_do_not_compile(tile, reason):
    with pytest.raises(nvrtc.CompileError, match=reason):
        few_rows.program_of(Form(tile, PLAIN, 0, False)).binary()


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
    uneven = Form(Tile(64, 24, 2, 4, True), PLAIN, 0, False)
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
