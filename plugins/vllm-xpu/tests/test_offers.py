from __future__ import annotations

import inspect
from dataclasses import replace

import pytest

from vllm_core.api import CAPABILITIES, OPS, Accepted, CallSite, KVGroupSpec, Rejected, load_entry
from vllm_core.ops.place import arguments_of
from vllm_triton import tuning
from vllm_xpu import platform, plugin
from vllm_xpu.backends import families, xpu_kernels
from vllm_xpu.backends.offers import PROVIDER, offers


def attention_site(**changes) -> CallSite:
    needs = {"op": "paged_attention", "role": "kv.0.full", "dtype": "bfloat16", "kv_dtype": "bfloat16"}
    return CallSite(**{**needs, "head_size": 128, "tokens_per_block": 64, **changes})


def attention(facts, provider: str):
    return next(one for one in offers(facts) if one.provider == provider and "paged_attention" in one.ops)


@pytest.mark.parametrize("architecture", families.ARCHITECTURES)
def test_every_family_offers_attention_of_its_own_architecture_alone(make_facts, architecture):
    whole = attention(make_facts(architecture), PROVIDER)
    assert isinstance(whole.judge(attention_site(head_size=64), architecture), Accepted)
    verdict = whole.judge(attention_site(), "0x4680")
    assert isinstance(verdict, Rejected)
    assert architecture in verdict.supported


@pytest.mark.parametrize(("architecture", "largest"), [("pvc", 128), ("bmg", 256), ("lnl", 256), ("dg2", 64)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_heads_are_offered_as_far_as_the_manifest_says(make_facts, architecture, largest, dtype):
    whole = attention(make_facts(architecture), PROVIDER)
    for size in (64, 80, 96, 128, 256):
        verdict = whole.judge(attention_site(dtype=dtype, kv_dtype=dtype, head_size=size), architecture)
        assert isinstance(verdict, Accepted if size <= largest else Rejected)
        if isinstance(verdict, Rejected):
            assert f"up to {largest}: " in verdict.supported
            assert "registers" in verdict.supported


def test_an_architecture_without_kernels_gets_no_offer(make_facts):
    assert offers(make_facts("0x4680")) == ()


def test_another_device_type_gets_no_offer(make_facts):
    assert offers(replace(make_facts(), device_type="cuda")) == ()


def test_xpu_kernels_is_offered_where_the_probe_found_it_and_goes_last(make_facts):
    assert not any(one.provider == xpu_kernels.PROVIDER for one in offers(make_facts()))
    found = offers(make_facts(xpu_kernels="0.1.16"))
    theirs = [one for one in found if one.provider == xpu_kernels.PROVIDER]
    assert {one.kind for one in theirs} == {"vendor"}
    assert max(one.priority for one in theirs) < min(one.priority for one in found if one.provider == PROVIDER)


@pytest.mark.parametrize("changes", [{"dtype": "float32"}, {"head_size": 80}, {"tokens_per_block": 256}])
def test_xpu_kernels_rejects_what_its_kernels_do_not_read(make_facts, changes):
    assert isinstance(
        attention(make_facts(xpu_kernels="0.1.16"), xpu_kernels.PROVIDER).judge(attention_site(**changes), "pvc"), Rejected
    )


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e4m3", "fp8_e5m2", "int8"])
def test_caches_of_8_bits_are_served_as_the_manifest_says_but_by_xpu_kernels(make_facts, dtype):
    for one in offers(make_facts(xpu_kernels="0.1.16")):
        if "paged_attention" in one.ops:
            size = 64 if one.block_sizes is None or 64 in one.block_sizes else 16
            site = attention_site(kv_dtype=dtype, head_size=64, tokens_per_block=size)
            assert isinstance(one.judge(site, "pvc"), Rejected if one.provider == xpu_kernels.PROVIDER else Accepted)


@pytest.mark.parametrize(
    ("architecture", "size", "need", "why"),
    [
        ("pvc", 128, "head size over a cache in int8", "registers spill"),
        ("dg2", 64, "kv dtype", "registers of attention spill"),
        ("bmg", 64, "kv dtype", "no compiler that tells"),
        ("lnl", 64, "kv dtype", "no compiler that tells"),
    ],
)
def test_other_caches_of_8_bits_are_rejected_with_the_reason(make_facts, architecture, size, need, why):
    site = attention_site(kv_dtype="int8", head_size=size)
    verdict = attention(make_facts(architecture), PROVIDER).judge(site, architecture)
    assert isinstance(verdict, Rejected)
    assert verdict.need == need
    assert why in verdict.supported


def test_every_entry_has_the_arguments_of_its_schema(make_facts):
    for offer in offers(make_facts(xpu_kernels="0.1.16")):
        for op, entry in offer.ops.items():
            given, known = len(inspect.signature(load_entry(entry)).parameters), len(arguments_of(OPS[op]))
            # Those of features that are not offered need not be taken.
            assert known - OPS[op].schema.count(" = None") <= given <= known, op


def test_a_block_of_xpu_kernels_holds_keys_and_values_of_all_heads(make_facts):
    group = KVGroupSpec(index=0, kind="full", layers=(0,), num_kv_heads=8, head_size=128)
    layout = attention(make_facts(xpu_kernels="0.1.16"), xpu_kernels.PROVIDER).kv_layout(group, "bfloat16", 16)
    assert layout.block_bytes == 2 * 16 * 8 * 128 * 2


def test_the_manifest_answers_for_every_capability():
    assert set(plugin.CLAIMS) == set(CAPABILITIES)


def test_the_manifest_says_that_nothing_ran_on_hardware():
    manifest = plugin.manifest()
    assert manifest.support_level == "experimental"
    assert manifest.note == (
        "experimental, not run on hardware: Intel's compiler accepts the kernels, and their non-DPAS form computes correctly "
        "on Intel's CPU runtime; never executed on an Intel GPU"
    )


@pytest.mark.parametrize("architecture", families.ARCHITECTURES)
def test_starting_chooses_the_tuning_of_the_architecture(make_facts, architecture, monkeypatch):
    monkeypatch.setattr(tuning, "_active", [])
    platform.start(make_facts(architecture))
    chosen = tuning.active()
    assert chosen.family == families.family_of(architecture).tuning.family
    assert chosen.multiprocessors == 64
    assert not chosen.pdl


def test_explicit_options_are_left_alone():
    assert platform.configure({}, frozenset({"max_num_batched_tokens"})).changes == {}


def test_every_change_has_a_reason():
    patch = platform.configure({}, frozenset())
    assert set(patch.changes) == set(patch.reasons) == {"max_num_batched_tokens"}
