"""What a platform has not tried is rejected, each by what it lacks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from vllm_core.api import Accepted, CallSite, Offer, QuantTensor, Rejected, UnsupportedError
from vllm_triton import tried, tuning
from vllm_triton.offers import LINEAR_FORMATS, block_bytes_of
from vllm_triton.ops.attention import paged_attention
from vllm_triton.ops.cache import KV, kv_bind
from vllm_triton.ops.experts import moe_pack
from vllm_triton.ops.linear import linear, linear_pack
from vllm_triton.portable import TUNING
from vllm_triton.tried import Reach, Tried

ARCHITECTURE = "chip"
SITE = CallSite(op="paged_attention", role="kv.0.full", dtype="bfloat16", kv_dtype="int8", head_size=128, tokens_per_block=16)


def offer_of(op: str, provider: str = "ours-gather", **limits) -> Offer:
    offers = tried.offers("ours", [ARCHITECTURE], Tried(**limits))
    return next(one for one in offers if op in one.ops and one.provider == provider)


def test_a_cache_of_codes_is_rejected_until_it_was_tried():
    verdict = offer_of("paged_attention", kv_dtypes=tried.NUMBERS, why="no compiler").judge(SITE, ARCHITECTURE)
    assert verdict == Rejected("kv dtype", "int8", "bfloat16, float16, float32: no compiler")
    assert isinstance(offer_of("paged_attention").judge(SITE, ARCHITECTURE), Accepted)


@pytest.mark.parametrize(
    ("limit", "need", "supported"),
    [
        ({"dtypes": frozenset({"float16"})}, "dtype over a cache in int8", "float16"),
        ({"codes": Reach(largest_head=64)}, "head size over a cache in int8", "up to 64"),
        ({"codes": Reach(smallest_block=32)}, "block size over a cache in int8", "32 or more"),
    ],
)
def test_what_limits_a_cache_of_codes_is_named_with_the_reason_and_leaves_one_of_numbers(limit, need, supported):
    offer = offer_of("paged_attention", **limit)
    verdict = offer.judge(SITE, ARCHITECTURE)
    assert isinstance(verdict, Rejected)
    assert verdict.need == need
    assert verdict.supported == f"{supported}: {tried.SPILL}"
    assert isinstance(offer.judge(replace(SITE, kv_dtype="bfloat16"), ARCHITECTURE), Accepted)


@pytest.mark.parametrize(
    ("reach", "need", "supported"),
    [
        (Reach(largest_head=64), "head size over a cache in bfloat16", "up to 64"),
        (Reach(smallest_block=32), "block size over a cache in bfloat16", "32 or more"),
    ],
)
def test_what_limits_a_cache_of_numbers_is_named_and_leaves_one_in_another_dtype(monkeypatch, reach, need, supported):
    limits = {"caches": {"bfloat16": reach}}
    site = replace(SITE, kv_dtype="bfloat16")
    for op in ("paged_attention", "kv_write", "kv_copy"):
        verdict = offer_of(op, **limits).judge(replace(site, op=op), ARCHITECTURE)
        assert isinstance(verdict, Rejected)
        assert (verdict.need, verdict.supported) == (need, f"{supported}: {tried.SPILL}")
    halves = replace(site, dtype="float16", kv_dtype="float16")
    assert isinstance(offer_of("paged_attention", **limits).judge(halves, ARCHITECTURE), Accepted)
    monkeypatch.setattr(tuning, "_active", [replace(TUNING, tried=Tried(caches={"bfloat16": Reach(largest_head=32)}))])
    with pytest.raises(UnsupportedError, match="head size over a cache in bfloat16"):
        bound("bfloat16")
    assert bound("float16").kind == 0


def test_a_cache_of_one_kind_of_codes_may_reach_less_far_than_the_others():
    offer = offer_of("paged_attention", caches={"int8": Reach(largest_head=64)})
    assert isinstance(offer.judge(SITE, ARCHITECTURE), Rejected)
    assert isinstance(offer.judge(replace(SITE, kv_dtype="fp8_e4m3"), ARCHITECTURE), Accepted)


def test_writers_of_codes_do_not_depend_on_the_dtype_of_the_model():
    offer = offer_of("kv_write", dtypes=frozenset({"float16"}))
    assert isinstance(offer.judge(replace(SITE, op="kv_write"), ARCHITECTURE), Accepted)


@pytest.mark.parametrize(
    ("limit", "named"),
    [
        ({"kv_dtypes": tried.NUMBERS}, "kv dtype"),
        ({"codes": Reach(largest_head=32)}, "head size"),
        ({"codes": Reach(smallest_block=32)}, "block size"),
    ],
)
def test_kernels_refuse_to_bind_a_cache_that_was_not_tried(monkeypatch, limit, named):
    monkeypatch.setattr(tuning, "_active", [replace(TUNING, tried=Tried(**limit))])
    with pytest.raises(UnsupportedError, match=named):
        bound("int8")
    assert bound("float16").kind == 0


def test_kernels_refuse_queries_over_codes_in_a_dtype_that_was_not_tried(monkeypatch):
    monkeypatch.setattr(tuning, "_active", [replace(TUNING, tried=Tried(dtypes=frozenset({"float16"})))])
    q, lengths = torch.zeros(1, 2, 64), torch.ones(1, dtype=torch.int32)
    start = torch.tensor([0, 1], dtype=torch.int32)
    with pytest.raises(UnsupportedError, match="float32"):
        paged_attention(q, q, bound("int8"), start, lengths, lengths[None], 1, 1, 0.1, 0, 0.0)


def bound(dtype: str) -> KV:
    return kv_bind(torch.zeros(1, block_bytes_of(2, 64, dtype, 16), dtype=torch.uint8), 2, 64, dtype, 16)


@pytest.mark.parametrize("op", ["linear", "moe"])
def test_formats_of_weights_are_those_that_were_tried(op):
    assert offer_of(op, "ours").formats == LINEAR_FORMATS
    assert offer_of(op, "ours", formats=frozenset({"plain", "q8_0", "made_up"})).formats == {"plain", "q8_0"}


@pytest.mark.parametrize("op", ["linear", "moe"])
def test_a_model_in_a_dtype_that_codes_were_not_tried_with_gets_plain_weights_alone(op):
    limits = Tried(dtypes=frozenset({"float16"}), formats=frozenset({"plain", "q8_0"}))
    offers = [one for one in tried.offers("ours", [ARCHITECTURE], limits) if op in one.ops]
    assert {(name, *sorted(one.formats)) for one in offers for name in one.dtypes} == {
        ("float16", "plain", "q8_0"),
        ("float32", "plain"),
        ("bfloat16", "plain"),
    }


PACKED = QuantTensor("int8_channel", (16, 128), torch.zeros(16, 128, dtype=torch.int8), torch.ones(16))


def test_kernels_refuse_to_pack_a_format_that_was_not_tried(monkeypatch):
    monkeypatch.setattr(tuning, "_active", [replace(TUNING, tried=Tried(formats=frozenset({"plain", "fp8_channel"})))])
    for call in (lambda: linear_pack(PACKED, None, ()), lambda: moe_pack(PACKED, PACKED, 1, ())):
        with pytest.raises(UnsupportedError, match="int8_channel") as caught:
            call()
        assert tried.SPILL in caught.value.expected


@pytest.mark.parametrize("rows", [1, 300])
def test_kernels_refuse_products_with_packed_weights_in_a_dtype_that_was_not_tried(monkeypatch, rows):
    monkeypatch.setattr(tuning, "_active", [replace(TUNING, tried=Tried(dtypes=frozenset({"float16"})))])
    packed = linear_pack(PACKED, None, ())
    with pytest.raises(UnsupportedError, match="float32"):
        linear(torch.zeros(rows, 16), torch.zeros(rows, 128), packed)
