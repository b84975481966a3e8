"""Names of shape classes: what they say, and that the edges they promise are there."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from vllm_core.api import FORMATS
from vllm_core.ops import classes, inputs
from vllm_core.ops.classes import THIRD, Variant, parse
from vllm_core.ops.quant import decode
from vllm_core.ops.shapes import shape_of


def test_options_change_sizes_and_nothing_else():
    plain, found = parse("mixed"), parse("mixed/q8/k2/d80/b32/h4096/v5000")
    assert (found.num_heads, found.num_kv_heads, found.head_size, found.tokens_per_block) == (8, 2, 80, 32)
    assert (found.width, found.vocab, found.rows, found.variant) == (4096, 5000, plain.rows, None)


def test_variants_add_up():
    assert parse("decode/window/cap/kv_float16").variant == Variant(window=THIRD, cap=True, kv_dtype="float16")
    assert parse("decode/window7/rest").variant == Variant(window=7, rest=True)
    assert parse("mixed/plain").variant == Variant()


def test_a_format_is_that_of_the_weight_of_both_kinds_of_products():
    for name in FORMATS:
        assert parse(f"mixed/h512/{name}").variant == Variant(weights=name)
        for op in (inputs.linear, inputs.gated_linear):
            (weight,) = [one.weight for one in op("bfloat16", 1, f"one_token/h512/{name}") if isinstance(one, inputs.Weight)]
            assert weight.format == name
            size = decode(weight, torch.float32).std() * 512**0.5
            assert 0.3 < size < 2, "products are about 1"


def test_without_a_variant_the_seed_turns_them():
    turned = [parse("mixed").variant_of(seed, "float32") for seed in range(8)]
    assert {bool(one.window) for one in turned} == {one.cap for one in turned} == {True, False}
    assert {one.kv_dtype for one in turned} == {None, "bfloat16"}
    assert len(set(turned)) == 8
    assert {parse("mixed/plain").variant_of(seed, "float32") for seed in range(8)} == {Variant()}


@pytest.mark.parametrize("name", ["no_pattern", "mixed/no_option", "mixed/q", "mixed/window-1"])
def test_a_wrong_name_is_an_error(name):
    with pytest.raises((KeyError, ValueError), match=r"no_pattern|unknown option"):
        parse(name)


@pytest.mark.parametrize("size", [1, 8, 16, 32, 128, 256])
def test_block_edges_follow_the_block_size(size):
    rows = shape_of(f"block_edges/b{size}").rows
    after = {before + count for before, count in rows}
    assert {size, size + 1} <= after
    assert size == 1 or {size - 1, 1} <= after
    assert all(count > 0 and before >= 0 for before, count in rows)
    assert any(before and count > 1 for before, count in rows), "a continued sequence crosses an edge"


def test_thousands_are_thousands():
    assert shape_of("thousands").max_seq_len > 4000


@pytest.mark.parametrize("name", [*classes.PATTERNS, "block_edges/b1", "mixed/window/rest", "decode/window7/rest"])
def test_what_a_query_sees_is_visible_and_its_own_slots_are(name):
    shape = shape_of(name)
    window = shape.window_of(shape.variant.window if shape.variant else 0)
    seen = shape.visible(window)
    assert seen[shape.slot_mapping].all()
    assert not seen[: shape.tokens_per_block].any(), "nobody sees the null block"
    expected = sum(min(before + count, window + count - 1 if window else before + count) for before, count in shape.rows)
    assert int(seen.sum()) == expected
    table = shape.behind(window)
    for row, (before, _) in enumerate(shape.rows):
        first = max(0, before - window + 1) // shape.tokens_per_block if window else 0
        assert not table[row, :first].any()
        assert torch.equal(table[row, first:], shape.block_table[row, first:])


def test_what_no_query_sees_is_nan_in_the_variant_rest():
    _, _, content, *_, window, _ = inputs.paged_attention("float32", 0, "decode/window7/rest")
    seen = shape_of("decode").visible(window)
    slots = content.blocks[:, 0, :, 0, 0].flatten()
    assert window == 7
    assert torch.equal(slots.isnan(), ~seen)
    assert not inputs.paged_attention("float32", 0, "decode/plain")[2].blocks.isnan().any()


@pytest.mark.parametrize(("name", "dtype"), [("mixed/kv_fp8", torch.float8_e4m3fn), ("mixed/kv_fp8_e5m2", torch.float8_e5m2)])
def test_content_of_narrow_caches_is_what_they_can_hold(name, dtype):
    blocks = inputs.paged_attention("float32", 0, name)[2].blocks
    assert torch.equal(blocks, blocks.to(dtype).float())


@pytest.mark.parametrize("op", ["paged_attention", "qk_norm_rope_attention"])
def test_sinks_are_an_argument_that_is_there_where_they_are_asked_for(op):
    plain, sinks = (getattr(inputs, op)("bfloat16", 0, f"decode/q16/k4/{variant}") for variant in ("plain", "sinks"))
    assert len(sinks) == len(plain) + 1
    assert all(torch.equal(one, other) for one, other in zip(plain, sinks, strict=False) if isinstance(one, torch.Tensor))
    found = sinks[-1]
    assert (found.dtype, found.shape) == (torch.float32, (16,))
    assert found.min() < -1
    assert set(found[1::2].tolist()) == {9.0, 100.0}
    assert parse("decode/sinks").variant.features(op) == {"sinks"}


def test_a_wide_output_is_float32():
    assert inputs.linear("bfloat16", 0, "mixed/wide")[0].dtype is torch.float32
    assert inputs.linear("bfloat16", 0, "mixed/plain")[0].dtype is torch.bfloat16


def test_names_are_read_without_torch():
    code = "import sys; import vllm_core.ops.classes; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
