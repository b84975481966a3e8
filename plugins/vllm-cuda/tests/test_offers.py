from __future__ import annotations

import inspect

import pytest

from vllm_core.api import CAPABILITIES, OPS, Accepted, CallSite, KVGroupSpec, Rejected, load_entry
from vllm_core.ops.place import arguments_of
from vllm_cuda import platform, plugin
from vllm_cuda.backends import families
from vllm_cuda.backends.offers import OWN, PROVIDER, offers
from vllm_triton.offers import kv_layout


def attention_site(**changes) -> CallSite:
    needs = {"op": "paged_attention", "role": "kv.0.full", "dtype": "bfloat16", "kv_dtype": "bfloat16"}
    return CallSite(**{**needs, "head_size": 128, "tokens_per_block": 64, **changes})


@pytest.mark.parametrize("architecture", families.ARCHITECTURES)
def test_every_family_offers_attention_of_its_own_architecture_alone(make_facts, architecture):
    mine = [one for one in offers(make_facts(architecture)) if one.provider == PROVIDER]
    (whole,) = [one for one in mine if "paged_attention" in one.ops]
    assert isinstance(whole.judge(attention_site(), architecture), Accepted)
    verdict = whole.judge(attention_site(), "sm_75")
    assert isinstance(verdict, Rejected)
    assert architecture in verdict.supported


def test_an_architecture_without_kernels_gets_no_offer(make_facts):
    assert offers(make_facts("sm_75")) == ()


def test_another_device_type_gets_no_offer(make_facts):
    from dataclasses import replace

    assert offers(replace(make_facts(), device_type="cpu")) == ()


@pytest.mark.parametrize(("size", "provider"), [(16, "vllm-cuda-gather"), (64, "vllm-cuda"), (256, "vllm-cuda")])
def test_small_blocks_are_served_by_the_gathering_provider(make_facts, size, provider):
    accepted = [
        one.provider
        for one in offers(make_facts("sm_80"))
        if "paged_attention" in one.ops and isinstance(one.judge(attention_site(tokens_per_block=size), "sm_80"), Accepted)
    ]
    assert accepted == [provider]


def test_a_rehearsal_knows_every_provider_of_one_gpu_as_its_own(make_facts):
    assert {one.provider for one in offers(make_facts()) if not one.ops.keys() & {"all_reduce"}} == OWN


@pytest.mark.parametrize("changes", [{"kv_dtype": "int4"}, {"head_size": 48}, {"tokens_per_block": 4}])
def test_what_no_kernel_reads_is_rejected_by_all(make_facts, changes):
    for one in offers(make_facts()):
        if "paged_attention" in one.ops:
            assert isinstance(one.judge(attention_site(**changes), "sm_90"), Rejected)


def test_every_entry_has_the_arguments_of_its_schema(make_facts):
    for offer in offers(make_facts()):
        for op, entry in offer.ops.items():
            assert len(inspect.signature(load_entry(entry)).parameters) == len(arguments_of(OPS[op])), op


def test_a_block_holds_keys_and_values_of_all_heads():
    group = KVGroupSpec(index=0, kind="full", layers=(0,), num_kv_heads=8, head_size=128)
    assert kv_layout(group, "bfloat16", 64).block_bytes == 2 * 64 * 8 * 128 * 2


def test_the_manifest_answers_for_every_capability():
    assert set(plugin.CLAIMS) == set(CAPABILITIES)


def test_explicit_options_are_left_alone():
    patch = platform.configure({}, frozenset({"max_num_batched_tokens", "graph_sizes"}))
    assert patch.changes == {}


def test_every_change_has_a_reason():
    patch = platform.configure({}, frozenset())
    assert set(patch.changes) == set(patch.reasons) == {"max_num_batched_tokens", "graph_sizes"}
