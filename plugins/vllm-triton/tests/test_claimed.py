"""What is compiled of a claim speaks for all of it."""

from __future__ import annotations

import pytest

from vllm_triton import claimed, tried, tuning
from vllm_triton.offers import BLOCK_SIZES, HEAD_SIZES, LINEAR_FORMATS
from vllm_triton.portable import TUNING
from vllm_triton.tried import ALL, Reach, Tried

ARCHITECTURE = "chip"


def shapes(dtype: str, kv_dtype: str, limits: Tried = ALL, *, corners: bool = False) -> list[claimed.Attention]:
    return [*claimed.attention(tried.offers("ours", [ARCHITECTURE], limits), ARCHITECTURE, dtype, kv_dtype, corners=corners)]


TILE = max(TUNING.extend.block_n, TUNING.decode.block_n)


@pytest.fixture(autouse=True)
def family(monkeypatch):
    monkeypatch.setattr(tuning, "_active", [TUNING])


def kind_of(head_size: int, tokens: int) -> tuple[object, ...]:
    return claimed.alike_heads(head_size), claimed.alike_blocks(tokens, TILE)


@pytest.mark.parametrize(
    ("tile", "alike"), [(16, [{1, 8}, {16, 32, 64, 128, 256}]), (64, [{1, 8}, {16}, {32}, {64, 128, 256}])]
)
def test_blocks_are_alike_that_hold_whole_tiles_or_none(tile, alike):
    kinds = {claimed.alike_blocks(tokens, tile) for tokens in BLOCK_SIZES}
    assert [{tokens for tokens in BLOCK_SIZES if claimed.alike_blocks(tokens, tile) == kind} for kind in sorted(kinds)] == alike


def test_every_kind_of_heads_with_every_kind_of_blocks_is_in_a_claim():
    wanted = {kind_of(size, tokens) for size in HEAD_SIZES for tokens in BLOCK_SIZES}
    found = shapes("bfloat16", "bfloat16")
    assert {kind_of(one.head_size, one.tokens_per_block) for one in found} == wanted
    assert {one.head_size for one in found} == HEAD_SIZES
    assert {one.tokens_per_block for one in found} == BLOCK_SIZES


def test_groups_and_masks_come_together_in_every_way():
    ways = {(1, 8, 64)[(one.group > 1) + (one.group > 8)] for one in shapes("float16", "int8")}
    both = {(one.group, one.masks) for one in shapes("float16", "int8") if one.group <= claimed.FEW}
    assert ways == {1, 8, 64}
    assert both == {(group, masks) for group in (claimed.FEW, claimed.ONE) for masks in (claimed.MASKS, claimed.NO_MASKS)}


def test_sizes_that_are_not_offered_are_not_in_a_claim():
    found = shapes("bfloat16", "int8", Tried(codes=Reach(largest_head=128, smallest_block=16)))
    assert max(one.head_size for one in found) == 128
    assert min(one.tokens_per_block for one in found) == 16


def test_the_corners_are_in_the_whole():
    assert set(shapes("bfloat16", "bfloat16", corners=True)) <= set(shapes("bfloat16", "bfloat16"))


@pytest.mark.parametrize("size", sorted(HEAD_SIZES))
def test_heads_that_are_alike_have_tiles_as_wide(size):
    wide, whole = claimed.alike_heads(size)
    assert wide // 2 < size <= wide
    assert whole == (size == wide)


def test_claims_are_all_that_is_offered_and_those_in_float32_the_last():
    limits = Tried(dtypes=frozenset({"float16"}), formats=frozenset({"plain", "fp8_tensor", "fp8_channel"}))
    assert claimed.claims(limits) == [
        "bfloat16/bfloat16",
        "bfloat16:plain",
        "float16/float16",
        *(f"float16/{name}" for name in claimed.CODES),
        "float16:plain",
        "float16:fp8_channel",
        "float32/float32",
        "float32:plain",
    ]
    forms = {name.partition(":")[2] for name in claimed.claims(ALL) if ":" in name}
    assert forms == LINEAR_FORMATS - {"fp8_tensor"}
