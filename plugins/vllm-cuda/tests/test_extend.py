"""Attention of prompts on Hopper: what it is compiled to, which calls it takes, and how it is offered."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from triton import knobs

from vllm_core.api import Accepted, CallSite, Rejected
from vllm_cuda import attention, extend, nvrtc, programs
from vllm_cuda.backends import families, hopper, prompts
from vllm_cuda.backends.offers import HOPPER_PROVIDER, OWN, offers
from vllm_cuda.extend_tiles import Form, Tile
from vllm_triton import tuning
from vllm_triton.offers import block_bytes_of
from vllm_triton.ops.cache import kv_bind

FORMS = {
    "Qwen3 8B": Form(prompts.TILES[128][0], 128, 8, 4, 64, False, False),
    "Qwen3 8B, one row": Form(prompts.TILES[128][0], 128, 8, 4, 64, True, False),
    "Qwen3 0.6B": Form(prompts.TILES[128][0], 128, 8, 2, 64, False, False),
    "Qwen3 0.6B, one row, float16": Form(prompts.TILES[128][0], 128, 8, 2, 256, True, True),
    "seven heads a KV head, small blocks": Form(prompts.TILES[64][0], 64, 2, 7, 16, False, False),
    "a head a KV head": Form(prompts.TILES[64][0], 64, 12, 1, 64, False, True),
    "few tiles": Form(prompts.TILES[128][1], 128, 8, 7, 64, False, False),
    "eight heads of 64": Form(prompts.TILES[64][0], 64, 8, 8, 64, False, False),
    "gpt-oss": Form(prompts.TILES[64][0], 64, 8, 8, 64, False, False, window=True, sinks=True),
    "gpt-oss, few tiles": Form(prompts.TILES[64][1], 64, 8, 8, 64, True, False, window=True, sinks=True),
    "a window": Form(prompts.TILES[128][0], 128, 8, 4, 64, False, False, window=True),
}


@pytest.mark.parametrize("name", FORMS)
def test_it_compiles_to_matrix_instructions_that_run_beside_others_without_spills(name, machine_code):
    form = FORMS[name]
    assert form.shared_bytes <= families.HOPPER.shared_bytes
    consumer, producer = form.tile.registers
    assert form.tile.groups * 128 * consumer + 128 * producer <= 64 << 10
    text = machine_code(extend.program_of(form).binary(), form.threads)
    kind = "F16" if form.half else "BF16"
    scores = text.count(f"HGMMA.64x{form.tile.keys}x16.F32{'' if form.half else '.' + kind}")
    assert scores >= form.head_size // 16
    assert all(word in text for word in ("tnspB", "UTMALDG.3D", "USETMAXREG", "PREEXIT", "ACQBULK"))
    # Where the compiler cannot tell that registers are free it waits for each product by itself.
    assert text.count("WARPGROUP.DEPBAR") < text.count("HGMMA") / 4


@pytest.mark.parametrize("name", ["Qwen3 8B", "a head a KV head"])
def test_exponents_of_a_tile_are_computed_while_values_of_the_one_before_are_summed(name, machine_code):
    form = FORMS[name]
    text = machine_code(extend.program_of(form).binary(), form.threads)
    waits = re.split(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x1", text)[1:]
    exponents = [wait.split("WARPGROUP.DEPBAR.LE gsb0, 0x0")[0].count("MUFU.EX2") for wait in waits]
    # In the steps over whole tiles of keys, with masks and without; where queries change they may come later.
    assert sum(count >= form.tile.keys // 2 for count in exponents) >= 2


@pytest.fixture
def on_hopper():
    before = list(tuning._active)
    tuning.use(hopper.TUNING, hopper.PROGRAMS)
    yield
    tuning._active[:] = before


def form_of(
    dtype=torch.bfloat16,
    kv_dtype="bfloat16",
    heads=8,
    size=128,
    block=64,
    wide=None,
    rows=2,
    start=0,
    out_dtype=None,
    length=4096,
    window=0,
    sinks=None,
) -> Form | None:
    memory = torch.zeros(3, block_bytes_of(2, size, kv_dtype, block), dtype=torch.uint8)
    kv = kv_bind(memory, 2, size, kv_dtype, block)
    q = torch.zeros(64, wide or heads * size, dtype=dtype)[:, start : start + heads * size].unflatten(1, (heads, size))
    out = torch.zeros(64, heads, size, dtype=out_dtype or dtype)
    return attention._form_of(out, q, kv, rows, length, window, sinks)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("size", sorted(prompts.TILES))
@pytest.mark.parametrize("block", sorted(prompts.BLOCK_SIZES))
def test_prompts_in_16_bits_are_taken_for_every_head_and_block_size_of_its_offer(on_hopper, dtype, size, block):
    form = form_of(getattr(torch, dtype), dtype, size=size, block=block, wide=12 * size)
    assert form == Form(prompts.TILES[size][1], size, 2, 4, block, False, dtype == "float16")


@pytest.mark.parametrize(("tokens", "split"), [(64, True), (256, True), (257, False), (8192, False)])
def test_steps_of_tiles_for_half_of_the_multiprocessors_halve_their_keys(tokens, split):
    assert prompts.attended(tokens, 4096, 4, 8, 128, hopper.PROGRAMS).split is split


@pytest.mark.parametrize(("size", "least"), prompts.LEAST_PAIRS.items())
def test_steps_whose_tokens_see_few_keys_are_left_to_the_shared_kernels(on_hopper, size, least):
    assert form_of(size=size, length=least // 64) is not None
    assert form_of(size=size, length=least // 64 - 1) is None
    assert form_of(size=size, window=least // 64 - 1) is None


def test_windows_and_sinks_are_compiled_apart(on_hopper):
    assert form_of() == replace(form_of(window=1000), window=False) == replace(form_of(sinks=torch.zeros(8)), sinks=False)
    assert form_of(window=1000).window
    assert form_of(sinks=torch.zeros(8)).sinks
    assert form_of() is form_of(), "it is looked up in every launch"


def test_single_queries_are_taken_along_where_no_other_kernel_follows(on_hopper):
    assert form_of(rows=1).singles
    assert not form_of(rows=2).singles


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": torch.float32, "kv_dtype": "float32"},
        {"kv_dtype": "float16"},
        {"kv_dtype": "fp8"},
        {"kv_dtype": "int8"},
        {"out_dtype": torch.float32},
        {"size": 96},
        {"size": 256},
        {"block": 8},
        {"heads": 130},
        # Tokens and heads that begin at no multiple of 16 bytes.
        {"wide": 8 * 128 + 4},
        {"wide": 9 * 128, "start": 4},
    ],
    ids=str,
)
def test_what_it_has_no_tile_for_is_left_to_the_shared_kernels(on_hopper, changes):
    assert form_of() is not None
    assert form_of(**changes) is None


@pytest.mark.parametrize(
    ("family", "multiprocessors"), [(families.AMPERE, 132), (families.BLACKWELL, 132), (families.HOPPER, 78)]
)
def test_other_chips_keep_the_shared_kernels(on_hopper, family, multiprocessors):
    tuning.use(family.tuning, multiprocessors)
    assert form_of() is None


def test_a_rehearsal_compiles_and_launches_nothing(tmp_path):
    q, kv = (
        torch.zeros(6, 8, 64, dtype=torch.bfloat16),
        torch.zeros(3, block_bytes_of(2, 64, "bfloat16", 64), dtype=torch.uint8),
    )
    counts = torch.tensor([0, 6], dtype=torch.int32)
    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path)
        form = Form(Tile(2, 64, 2), 64, 2, 4, 64, True, False)
        with programs.rehearsal():
            bound = kv_bind(kv, 2, 64, "bfloat16", 64)
            other = replace(form, singles=False)
            extend.launch(q, q, bound, counts, counts[1:], counts.view(1, 2), 6, 0.1, 0, None, form, (other,), 132)
        files = {file.read_bytes() for file in tmp_path.rglob("*.cubin")}
        assert files == {extend.program_of(one).binary() for one in (form, other)}


def site(**changes) -> CallSite:
    needs = {"op": "paged_attention", "role": "kv.0.full", "dtype": "bfloat16", "kv_dtype": "bfloat16"}
    return CallSite(**{**needs, "head_size": 128, "tokens_per_block": 64, **changes})


def mine(make_facts, architecture="sm_90"):
    found = [one for one in offers(make_facts(architecture)) if "paged_attention" in one.ops]
    return [one for one in found if one.provider.startswith(HOPPER_PROVIDER)], [one for one in found if one.provider in OWN]


def test_it_is_offered_on_hopper_before_the_shared_attention_of_the_same_blocks(make_facts):
    own, all_of_them = mine(make_facts)
    for one in own:
        others = [other for other in all_of_them if other.block_sizes & one.block_sizes and other is not one]
        assert len(others) == 1
        assert one.priority > others[0].priority
        assert one.ops.keys() == others[0].ops.keys(), "what shares a layout is chosen together"
    for other in families.ARCHITECTURES:
        assert bool(mine(make_facts, other)[0]) is (other == "sm_90")


def test_whole_tiles_come_before_blocks_that_are_parts_of_one(make_facts):
    whole, parts = mine(make_facts)[0]
    assert whole.priority > parts.priority
    assert min(whole.block_sizes) > max(parts.block_sizes)


@pytest.mark.parametrize(
    "changes",
    [
        {"features": frozenset({"soft_cap"})},
        {"dtype": "float32", "kv_dtype": "float32"},
        *({"kv_dtype": name} for name in ("int8", "fp8", "float16")),
        {"head_size": 256},
        {"tokens_per_block": 8},
    ],
    ids=str,
)
def test_masks_codes_and_sizes_that_it_has_not_are_rejected(make_facts, changes):
    for one in mine(make_facts)[0]:
        assert isinstance(one.judge(site(**changes), "sm_90"), Rejected)


@pytest.mark.parametrize("features", [(), ("sliding_window",), ("sinks",), ("sliding_window", "sinks")], ids=str)
@pytest.mark.parametrize("block", sorted(prompts.BLOCK_SIZES))
def test_every_block_size_is_accepted_by_one_offer_with_windows_and_sinks(make_facts, block, features):
    asked = site(tokens_per_block=block, features=frozenset(features))
    verdicts = [one.judge(asked, "sm_90") for one in mine(make_facts)[0]]
    assert sum(isinstance(one, Accepted) for one in verdicts) == int(nvrtc.installed())
