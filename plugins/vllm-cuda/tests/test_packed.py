"""Packed weights: where codes and scales lie, which weights are taken, and what the kernels compile to."""

from __future__ import annotations

import itertools
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from triton import knobs

from vllm_core.api import Accepted, CallSite, QuantTensor, Rejected
from vllm_core.ops.quant import quantize
from vllm_cuda import chip, linear, nvrtc, packed_linear, packed_rows, packed_wide, programs
from vllm_cuda.backends import families
from vllm_cuda.backends.offers import PACKED_PROVIDER, _packed, offers
from vllm_cuda.backends.packed import MOST_BLOCKS, tile_of
from vllm_cuda.backends.packed_wide import LEAST, MOST, SMALL, SMALL_LEAST, SMALL_MOST, wide_tile
from vllm_cuda.packed import Packed, pack
from vllm_cuda.packed_tiles import Layout, PackedForm, PackedTile, WideForm
from vllm_cuda.tiles import ADD, GATED, PLAIN
from vllm_triton.kernels.codec import E4M3, INT8
from vllm_triton.kernels.quant import INT4
from vllm_triton.ops import quant

LAYOUTS = {
    "int4_group/128": Layout(INT4.value, 1, 1, True),
    "int4_group/32, float32": Layout(INT4.value, 4, 0, True),
    "q4_0": Layout(INT4.value, 4, 1, False),
    "int8_channel": Layout(INT8.value, 0, 0, False),
    "q8_0": Layout(INT8.value, 4, 1, False),
    "fp8_channel": Layout(E4M3.value, 0, 0, False),
    "fp8_block128": Layout(E4M3.value, 1, 0, False),
}
SHAPES = {"qkv": (6144, 4096, PLAIN), "o": (4096, 4096, ADD), "gate_up": (12288, 4096, GATED), "down": (4096, 12288, ADD)}
"""Rows of out, columns of x, and what is done with the product, of Qwen3 8B."""

GROUPS = (1, 2, 3, 4, 6, 8)
REGISTERS, BARRIERS = 64 << 10, 16

ODD_DESCRIPTOR = r"desc\[UR\d*[13579]\]"
"""Of an instruction that no chip runs: a descriptor begins at an even register. The compiler of CUDA 13.0 makes it of a copy
with a policy for the L2 cache whose target is a sum with a uniform register."""

compiles = pytest.mark.skipif(not nvrtc.installed(), reason="needs NVRTC: pip install nvidia-cuda-nvrtc")


@pytest.fixture
def own_cache(tmp_path):
    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path)
        yield tmp_path


def chip_of(architecture: str, multiprocessors: int = 132) -> chip.Chip:
    family = families.family_of(architecture)
    assert family is not None
    return chip.Chip(architecture, multiprocessors, family.shared_bytes)


def input_of(lane: int, register: int, half: int, step: int) -> tuple[int, int]:
    """Row and input of 16 that half ``half`` of register ``register`` of a lane's operand A holds (PTX ISA, m16n8k16), where
    inputs are named so that a lane has eight neighbours of 32 in two steps: of its columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9,
    in this order, four each."""
    return lane // 4 + register % 2 * 8, lane % 4 * 8 + step * 4 + register // 2 * 2 + half


def numbers_of(word: int, kind: int) -> list[int]:
    """Codes of a word, in the order in which the kernel widens pairs: lower half, upper half, of one pair after the other."""
    if kind == INT4.value:
        return [word >> shift & 15 for i in range(4) for shift in (4 * i, 16 + 4 * i)]
    if kind == INT8.value:
        return [word >> shift & 255 for i in range(2) for shift in (8 * i, 16 + 8 * i)]
    halves = (word & 0xFFFF, word >> 16)
    first = [half >> 8 & 0x80 | half >> 4 & 0x7F for half in halves]
    return first + [half >> 4 & 0x80 | half >> 8 & 0x70 | half & 0x0F for half in halves]


def weight_of(codes: torch.Tensor, kind: int) -> quant.QuantPacked:
    """Codes [N,K] as the shared kernels have them; four bits in groups of 32."""
    rows, columns = codes.shape
    if kind != INT4.value:
        return quant.QuantPacked(codes, torch.ones(rows), torch.ones(rows), None, rows, columns, 128, 0, kind)
    halves = codes.view(rows, -1, 2, 16)
    nibbles = (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(rows, columns // 2)
    scale, zero = torch.ones(rows, columns // 32), torch.zeros(rows, columns // 32, dtype=torch.uint8)
    return quant.QuantPacked(nibbles, scale, zero, None, rows, columns, 32, 32, kind)


@pytest.mark.parametrize(("kind", "largest"), [(INT4.value, 16), (INT8.value, 256), (E4M3.value, 256)])
@pytest.mark.parametrize(("rows", "columns"), [(16, 128), (37, 352)])
def test_each_lane_finds_its_operands_codes_in_sixteen_bytes(kind, largest, rows, columns):
    codes = torch.randint(0, largest, (rows, columns), dtype=torch.uint8)
    packed = pack(weight_of(codes, kind))
    assert packed is not None
    whole = torch.nn.functional.pad(codes, (0, -columns % 128, 0, -rows % 16)).tolist()
    for block, records in enumerate(packed.codes.view(torch.int32).tolist()):
        for record, held in enumerate(records):
            for unit, lane, row_half in itertools.product(range(4), range(32), range(2)):
                first = ((unit // 2 if kind == INT4.value else unit) * 32 + lane) * 4
                load = [one & 0xFFFFFFFF for one in held[first : first + 4]]
                mine = [load[unit % 2 * 2 + row_half]] if kind == INT4.value else load[row_half * 2 : row_half * 2 + 2]
                for place, number in enumerate(number for word in mine for number in numbers_of(word, kind)):
                    row, column = input_of(lane, place // 2 % 2 * 2 + row_half, place % 2, place // 4)
                    assert number == whole[block * 16 + row][record * 128 + unit * 32 + column]


@pytest.mark.parametrize("group", [32, 64, 128, 256])
def test_scales_and_zeros_of_rows_eight_apart_lie_together(group):
    rows, columns = 24, 768
    scale = torch.rand(rows, columns // group).half()
    zero = torch.randint(0, 16, scale.shape, dtype=torch.uint8)
    weight = QuantTensor("int4_group", (rows, columns), torch.zeros(rows, columns // 2, dtype=torch.uint8), scale, zero)
    packed = pack(quant.pack(weight, None, on="linear_pack"))
    assert packed is not None
    sets = max(1, 128 // group)
    assert packed.layout == Layout(INT4.value, sets, 1, True)
    held = packed.scales.view(2, columns // 128, -1)
    scales = held[:, :, : sets * 32].contiguous().view(torch.float16).view(2, -1, sets, 8, 2)
    zeros = held[:, :, sets * 32 :].view(2, -1, sets, 8, 2)
    for row, column in itertools.product(range(rows), range(0, columns, 32)):
        place = row // 16, column // 128, column % 128 * sets // 128, row % 8, row % 16 // 8
        assert scales[place] == scale[row, column // group]
        assert zeros[place] == zero[row, column // group]


def test_scales_keep_the_narrowest_type_that_has_them_and_the_usual_zero_is_not_stored():
    data, shape = torch.zeros(16, 64, dtype=torch.uint8), (16, 128)
    usual, other = torch.full((16, 1), 8, dtype=torch.uint8), torch.full((16, 1), 7, dtype=torch.uint8)
    cases = ((0.5, usual, 1, False), (2.0**-60, other, 2, True), (1 / 3, usual, 0, False))
    for value, zero, scale, zeros in cases:
        packed = pack(
            quant.pack(QuantTensor("int4_group", shape, data, torch.full((16, 1), value), zero), None, on="linear_pack")
        )
        assert packed is not None
        assert packed.layout == Layout(INT4.value, 1, scale, zeros)
        assert packed.scales.shape[2] == packed.layout.scale_bytes


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("name", ["fp8_channel", "fp8_block128"])
def test_the_scale_of_a_group_with_nan_is_nan(name, code):
    codes = torch.zeros(4, 256, dtype=torch.uint8)
    codes[1, 200] = code
    scale = torch.ones(1, 2) if name == "fp8_block128" else torch.ones(4)
    packed = pack(quant.pack(QuantTensor(name, (4, 256), codes.view(torch.float8_e4m3fn), scale), None, on="linear_pack"))
    assert packed is not None
    if name == "fp8_channel":
        assert packed.row_scale.isnan().tolist() == [False, True, False, False]
    else:
        held = packed.scales.view(torch.float32).view(2, 8, 2)
        assert held.isnan().nonzero().tolist() == [[1, 1, 0]]


def test_rows_of_no_whole_pieces_stay_with_the_shared_kernels():
    packed = packed_linear.linear_pack(quantize(torch.randn(16, 100), "int8_channel"), None, ())
    assert isinstance(packed, linear.Packed)
    assert isinstance(packed.shared, quant.QuantPacked)


def test_plain_weights_go_the_way_that_they_went():
    assert isinstance(packed_linear.linear_pack(torch.zeros(64, 64, dtype=torch.bfloat16), None, ()), linear.Packed)


def test_a_bias_is_kept_in_float32():
    bias = torch.randn(16).bfloat16()
    packed = packed_linear.linear_pack(quantize(torch.randn(16, 128), "int8_channel"), bias, ())
    assert isinstance(packed, Packed)
    assert packed.bias is not None
    assert torch.equal(packed.bias, bias.float())


@given(
    st.sampled_from(GROUPS),
    st.integers(1, 160000),
    st.integers(1, 40000),
    st.sampled_from(sorted(LAYOUTS)),
    st.booleans(),
    st.sampled_from(families.ARCHITECTURES),
    st.sampled_from([1, 20, 84, 108, 132, 160]),
)
def test_every_tile_fits_the_chip(groups, rows, columns, name, gated, architecture, multiprocessors):
    on = chip_of(architecture, multiprocessors)
    tile = tile_of(groups, rows, columns, LAYOUTS[name], gated, on)
    form = PackedForm(LAYOUTS[name], tile, groups, GATED if gated else PLAIN, 0, False, False, False)
    assert form.shared_bytes <= on.shared_bytes
    assert form.threads <= 1024 // tile.resident
    assert tile.rows % (32 if gated else 16) == 0
    assert tile.row_warps * tile.blocks <= MOST_BLOCKS
    assert tile.parts < BARRIERS
    assert tile.stages >= 2
    assert tile.parts * tile.cluster <= max(1, -(-columns // 128))
    assert tile.cluster == 1 or chip.depends(architecture)


@given(
    st.integers(SMALL_LEAST, SMALL_MOST) | st.integers(LEAST, MOST),
    st.integers(1, 160000),
    st.integers(1, 40000),
    st.sampled_from(sorted(LAYOUTS)),
    st.booleans(),
    st.sampled_from([1, 20, 66, 132, 144]),
)
def test_programs_that_share_tiles_of_many_rows_have_room_at_once(count, rows, columns, name, gated, multiprocessors):
    on = chip_of("sm_90", multiprocessors)
    tile = wide_tile(count, rows, columns, LAYOUTS[name], gated, on)
    if tile is None:
        assert rows * columns < SMALL
        assert not SMALL_LEAST <= count <= SMALL_MOST
        return
    form = WideForm(LAYOUTS[name], tile, GATED if gated else PLAIN, 0, False, False, False)
    assert form.shared_bytes <= on.shared_bytes
    assert tile.stages >= 2
    if tile.shares > 1:
        programs = packed_wide.programs_of(form, count, rows)
        assert programs <= multiprocessors
        assert programs // tile.shares * 4 <= packed_wide.LOCKS_BYTES
        assert programs * tile.part_floats * 4 <= packed_wide.PARTS_BYTES
        assert tile.shares <= -(-columns // 128)


@pytest.mark.parametrize("architecture", families.ARCHITECTURES)
def test_only_hopper_has_the_kernel_of_many_rows_and_for_as_many_as_it_is_faster_for(architecture):
    counts = (LEAST - 1, LEAST, MOST, MOST + 1)
    found = [wide_tile(count, 4096, 4096, LAYOUTS["q4_0"], False, chip_of(architecture)) for count in counts]
    assert [one is not None for one in found] == ([False, True, True, False] if architecture == "sm_90" else [False] * 4)


def dump(binary: bytes, folder: Path, option: str) -> str:
    file = folder / "kernel.cubin"
    file.write_bytes(binary)
    return subprocess.run([knobs.nvidia.cuobjdump.path, option, str(file)], capture_output=True, text=True, check=True).stdout


def resources(binary: bytes, folder: Path) -> tuple[int, int]:
    """Registers and stack bytes of a thread; a stack stands for spills."""
    text = dump(binary, folder, "--dump-resource-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2])


SOON = ("sm_90",)


@compiles
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("groups", [1, *(pytest.param(one, marks=pytest.mark.slow) for one in (2, 4)), 8])
@pytest.mark.parametrize(
    "architecture", [pytest.param(one, marks=() if one in SOON else pytest.mark.slow) for one in families.ARCHITECTURES]
)
def test_products_compile_within_registers_and_without_spills(name, groups, architecture, tmp_path):
    on = chip_of(architecture)
    for rows, columns, epilogue in SHAPES.values():
        tile = tile_of(groups, rows, columns, LAYOUTS[name], epilogue == GATED, on)
        form = PackedForm(LAYOUTS[name], tile, groups, epilogue, 0, True, epilogue == PLAIN, False)
        binary = packed_rows.rows_program(form, architecture).binary()
        registers, stack = resources(binary, tmp_path)
        assert stack == 0
        assert registers * form.threads * tile.resident <= REGISTERS
        instructions = dump(binary, tmp_path, "--dump-sass")
        assert "HMMA.16816.F32.BF16" in instructions
        assert re.search(ODD_DESCRIPTOR, instructions) is None


@compiles
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("count", [*(pytest.param(one, marks=pytest.mark.slow) for one in (33, 48, 96, 256)), 64, 128])
def test_products_of_many_rows_compile_without_spills_and_do_not_wait_for_each_multiplication(name, count, tmp_path):
    on = chip_of("sm_90")
    for rows, columns, epilogue in SHAPES.values():
        tile = wide_tile(count, rows, columns, LAYOUTS[name], epilogue == GATED, on)
        assert tile is not None
        form = WideForm(LAYOUTS[name], tile, epilogue, 0, True, epilogue == PLAIN, epilogue == ADD)
        binary = packed_wide.program_of(form).binary()
        registers, stack = resources(binary, tmp_path)
        assert stack == 0
        assert registers * form.threads <= REGISTERS
        instructions = dump(binary, tmp_path, "--dump-sass")
        multiplied, waited = (len(re.findall(word, instructions)) for word in ("HGMMA", "WARPGROUP.DEPBAR"))
        # One of four is waited for; the compiler waits for each where it sees no other way.
        assert multiplied == 8 * tile.bands
        assert waited < multiplied


@compiles
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_widening_compiles_on_every_architecture(name, dtype, tmp_path):
    for architecture in families.ARCHITECTURES:
        program = packed_rows.whole_program(LAYOUTS[name], dtype, architecture)
        assert resources(program.binary(), tmp_path)[1] == 0


@compiles
@pytest.mark.parametrize("kind", range(4))
def test_float16_each_activation_and_a_bias_compile(kind):
    form = PackedForm(LAYOUTS["fp8_channel"], PackedTile(2, 2, 1, 2, 3, 1), 1, GATED, kind, True, False, True)
    assert packed_rows.rows_program(form, "sm_90").binary()


@compiles
def test_a_rehearsal_compiles_what_products_would_launch(own_cache, monkeypatch):
    monkeypatch.setattr(chip, "_active", [chip_of("sm_90")])
    weight = packed_linear.linear_pack(quantize(torch.randn(64, 256), "int8_channel"), None, ())
    made = {count: [torch.zeros(count, width, dtype=torch.bfloat16) for width in (64, 32, 256)] for count in (3, 100, 600)}
    with programs.rehearsal():
        for wide, _, x in made.values():
            packed_linear.linear(wide, x, weight)
        wide, narrow, x = made[3]
        packed_linear.linear_add(wide, torch.empty_like(wide), x, weight)
        packed_linear.gated_linear(narrow, wide, x, weight, "silu")
    # Of 3 rows three products; of 100 one; of 600 the widened weight.
    assert len(list(own_cache.rglob("*.cubin"))) == 5


def test_it_is_offered_on_every_family_before_the_shared_products(make_facts):
    for architecture in families.ARCHITECTURES:
        all_of_them = [one for one in offers(make_facts(architecture)) if "linear" in one.ops]
        (mine,) = [one for one in all_of_them if one.provider == PACKED_PROVIDER]
        shared = [one for one in all_of_them if one.provider == "vllm-cuda"]
        assert [mine.priority > one.priority and mine.formats == one.formats for one in shared] == [True]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_float32_and_a_host_without_a_compiler_are_rejected(dtype):
    offer = _packed(True, frozenset({"sm_90"}))
    site = CallSite(op="linear", role="linear", dtype=dtype)
    assert isinstance(offer.judge(site, "sm_90"), Accepted)
    assert isinstance(offer.judge(replace(site, dtype="float32"), "sm_90"), Rejected)
    verdict = _packed(False, frozenset({"sm_90"})).judge(site, "sm_90")
    assert isinstance(verdict, Rejected)
    assert "NVRTC" in str(verdict)
