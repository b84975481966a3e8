from __future__ import annotations

import inspect
from dataclasses import replace

import pytest

from vllm_core.api import CAPABILITIES, OPS, Accepted, CallSite, KVGroupSpec, Rejected, load_entry
from vllm_core.ops.place import arguments_of
from vllm_rocm import platform, plugin
from vllm_rocm.backends import aiter, families
from vllm_rocm.backends.offers import PROVIDER, offers
from vllm_triton import tuning
from vllm_triton.offers import LINEAR_FORMATS


def attention_site(**changes) -> CallSite:
    needs = {"op": "paged_attention", "role": "kv.0.full", "dtype": "bfloat16", "kv_dtype": "bfloat16"}
    return CallSite(**{**needs, "head_size": 128, "tokens_per_block": 64, **changes})


def attention(facts, provider: str):
    return next(one for one in offers(facts) if one.provider == provider and "paged_attention" in one.ops)


@pytest.mark.parametrize("architecture", families.ARCHITECTURES)
def test_every_family_offers_attention_of_its_own_architecture_alone(make_facts, architecture):
    whole = attention(make_facts(architecture), PROVIDER)
    assert isinstance(whole.judge(attention_site(), architecture), Accepted)
    verdict = whole.judge(attention_site(), "gfx906")
    assert isinstance(verdict, Rejected)
    assert architecture in verdict.supported


def test_an_architecture_without_kernels_gets_no_offer(make_facts):
    assert offers(make_facts("gfx906")) == ()


def test_another_device_type_gets_no_offer(make_facts):
    assert offers(replace(make_facts(), device_type="cuda")) == ()


def test_aiter_is_offered_where_the_probe_found_it_and_goes_last(make_facts):
    assert not any(one.provider == aiter.PROVIDER for one in offers(make_facts()))
    found = offers(make_facts(aiter="0.1.7"))
    theirs = [one for one in found if one.provider == aiter.PROVIDER]
    assert {one.kind for one in theirs} == {"vendor"}
    assert max(one.priority for one in theirs) < min(one.priority for one in found if one.provider == PROVIDER)


@pytest.mark.parametrize("changes", [{"dtype": "float32"}, {"head_size": 80}, {"tokens_per_block": 128}])
def test_aiter_rejects_what_its_kernels_do_not_read(make_facts, changes):
    assert isinstance(attention(make_facts(aiter="0.1.7"), aiter.PROVIDER).judge(attention_site(**changes), "gfx942"), Rejected)


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e4m3", "fp8_e5m2", "int8"])
@pytest.mark.parametrize("architecture", families.ARCHITECTURES)
def test_caches_of_8_bits_are_served_as_the_manifest_says_but_by_aiter(make_facts, architecture, dtype):
    for one in offers(make_facts(architecture, aiter="0.1.7")):
        if "paged_attention" in one.ops:
            size = 64 if one.block_sizes is None or 64 in one.block_sizes else 16
            verdict = one.judge(attention_site(kv_dtype=dtype, head_size=64, tokens_per_block=size), architecture)
            assert isinstance(verdict, Rejected if one.provider == aiter.PROVIDER else Accepted)


def test_blocks_whose_codes_spill_registers_are_rejected(make_facts):
    scattered = attention(make_facts(), f"{PROVIDER}-gather")
    small = attention_site(tokens_per_block=8)
    assert isinstance(scattered.judge(small, "gfx942"), Accepted)
    verdict = scattered.judge(replace(small, kv_dtype="int8"), "gfx942")
    assert isinstance(verdict, Rejected)
    assert (verdict.need, verdict.wanted) == ("block size over a cache in int8", "8")


@pytest.mark.parametrize(("architecture", "outcome"), [("gfx942", Accepted), ("gfx1100", Rejected), ("gfx1201", Rejected)])
def test_codes_for_a_model_in_float32_are_rejected_where_registers_are_few(make_facts, architecture, outcome):
    site = attention_site(dtype="float32", kv_dtype="fp8")
    assert isinstance(attention(make_facts(architecture), PROVIDER).judge(site, architecture), outcome)


@pytest.mark.parametrize("size", [128, 256])
def test_heads_whose_codes_spill_registers_are_rejected_where_they_do(make_facts, size):
    wide = attention_site(kv_dtype="int8", head_size=size)
    for architecture in ("gfx942", "gfx1201"):
        assert isinstance(attention(make_facts(architecture), PROVIDER).judge(wide, architecture), Accepted)
    verdict = attention(make_facts("gfx1100"), PROVIDER).judge(wide, "gfx1100")
    assert isinstance(verdict, Rejected)
    assert (verdict.need, verdict.wanted) == ("head size over a cache in int8", str(size))
    assert "up to 64" in verdict.supported


@pytest.mark.parametrize(
    ("architecture", "dtype", "size", "outcome"),
    [
        ("gfx1100", "bfloat16", 128, Accepted),
        ("gfx1100", "bfloat16", 160, Rejected),
        ("gfx1201", "bfloat16", 256, Accepted),
        ("gfx1201", "float32", 64, Accepted),
        ("gfx1201", "float32", 80, Rejected),
        ("gfx942", "float32", 256, Accepted),
    ],
)
def test_heads_that_spill_registers_are_rejected_over_numbers_too_and_in_encoders(
    make_facts, architecture, dtype, size, outcome
):
    site = attention_site(dtype=dtype, kv_dtype=dtype, head_size=size)
    verdict = attention(make_facts(architecture), PROVIDER).judge(site, architecture)
    assert isinstance(verdict, outcome)
    if isinstance(verdict, Rejected):
        assert (verdict.need, verdict.wanted) == (f"head size over a cache in {dtype}", str(size))
        assert "registers spill" in verdict.supported
    encoder = next(one for one in offers(make_facts(architecture)) if "encoder_attention" in one.ops)
    embedding = CallSite(op="encoder_attention", role="attention.encoder", dtype=dtype, head_size=size)
    assert isinstance(encoder.judge(embedding, architecture), outcome)


@pytest.mark.parametrize("op", ["linear", "moe"])
@pytest.mark.parametrize(("architecture", "left_out"), [("gfx942", {"int4_group", "q8_0", "q4_0"}), ("gfx1100", set())])
def test_packed_weights_are_read_where_that_neither_spills_nor_is_slow(make_facts, architecture, left_out, op):
    found = [one for one in offers(make_facts(architecture)) if op in one.ops and "bfloat16" in one.dtypes]
    assert [set(LINEAR_FORMATS - one.formats) for one in found] == [left_out]


def test_models_in_float32_get_weights_as_they_are_on_rdna(make_facts):
    found = [one for one in offers(make_facts("gfx1201")) if "linear" in one.ops and "float32" in one.dtypes]
    assert [one.formats for one in found] == [{"plain"}]


def test_every_entry_has_the_arguments_of_its_schema(make_facts):
    for offer in offers(make_facts(aiter="0.1.7")):
        for op, entry in offer.ops.items():
            given, known = len(inspect.signature(load_entry(entry)).parameters), len(arguments_of(OPS[op]))
            # Those of features that are not offered need not be taken.
            assert known - OPS[op].schema.count(" = None") <= given <= known, op


def test_a_block_of_aiter_holds_keys_and_values_of_all_heads(make_facts):
    group = KVGroupSpec(index=0, kind="full", layers=(0,), num_kv_heads=8, head_size=128)
    layout = attention(make_facts(aiter="0.1.7"), aiter.PROVIDER).kv_layout(group, "bfloat16", 16)
    assert layout.block_bytes == 2 * 16 * 8 * 128 * 2


def test_the_manifest_answers_for_every_capability():
    assert set(plugin.CLAIMS) == set(CAPABILITIES)


def test_the_manifest_says_that_nothing_ran_on_hardware():
    manifest = plugin.manifest()
    assert manifest.support_level == "experimental"
    assert manifest.note == (
        "experimental, not run on hardware: kernels compile to AMD machine code within LDS and register limits for these "
        "architectures; the algorithm is verified in the interpreter; never executed on AMD hardware"
    )


@pytest.mark.parametrize("architecture", families.ARCHITECTURES)
def test_starting_chooses_the_tuning_of_the_architecture(make_facts, architecture, monkeypatch):
    monkeypatch.setattr(tuning, "_active", [])
    platform.start(make_facts(architecture))
    chosen = tuning.active()
    assert chosen.family == families.family_of(architecture).tuning.family
    assert chosen.multiprocessors == 304
    assert not chosen.pdl


def test_explicit_options_are_left_alone():
    patch = platform.configure({}, frozenset({"max_num_batched_tokens", "graph_sizes"}))
    assert patch.changes == {}


def test_every_change_has_a_reason():
    patch = platform.configure({}, frozenset())
    assert set(patch.changes) == set(patch.reasons) == {"max_num_batched_tokens", "graph_sizes"}
