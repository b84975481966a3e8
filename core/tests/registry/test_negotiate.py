"""One block size for all KV groups, settled before weights load."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_core.api import Accepted, Rejected
from vllm_core.api.ops import family_of
from vllm_core.errors import PlanError
from vllm_core.registry.select import plan

KV = family_of("kv_write")


def bound(chosen):
    return {(one.op, one.role): one.provider for one in chosen.bindings}


def test_the_default_block_size_is_16(needs, candidate):
    chosen = plan(needs(), [candidate()], [])
    assert [group.layout.tokens_per_block for group in chosen.kv_groups] == [16]
    assert chosen.reasons["block_size"].startswith("16:")


def test_the_users_block_size_is_taken_or_refused(needs, candidate, offer):
    assert plan(needs(block_size=7), [candidate()], []).kv_groups[0].layout.tokens_per_block == 7
    only_64 = offer("fast", ops=KV, block_sizes=frozenset({64}))
    wants = needs(block_size=32, providers={"kv_write": "fast"})
    with pytest.raises(PlanError, match="block size: wanted 32, supported 64"):
        plan(wants, [candidate(offers=(only_64,))], [])


def test_a_block_size_at_which_better_providers_serve_is_preferred(needs, candidate, offer):
    only_64 = offer("fast", ops=KV, block_sizes=frozenset({64}))
    chosen = plan(needs(), [candidate(offers=(only_64,))], [])
    assert bound(chosen)["kv_write", "kv.0.full"] == "fast"
    assert chosen.kv_groups[0].layout.tokens_per_block == 64


def test_one_block_size_is_found_for_all_groups(needs, candidate, offer):
    offers = (
        offer("full", ops=KV, block_sizes=frozenset({16, 64}), accepts=lambda s: _accept(full_role(s)), priority=20),
        offer("window", ops=KV, block_sizes=frozenset({32, 64}), accepts=lambda s: _accept(not full_role(s)), priority=20),
    )
    chosen = plan(needs(windows=(None, 8)), [candidate(offers=offers)], [])
    assert [group.layout.tokens_per_block for group in chosen.kv_groups] == [64, 64]


def _accept(fits):
    return Accepted() if fits else Rejected("group", "this", "the other")


def full_role(site):
    return site.role.endswith("full")


def test_groups_without_a_common_block_size_are_refused_with_the_sizes_of_each(needs, candidate, offer):
    offers = (
        offer("full", ops=KV, block_sizes=frozenset({16}), accepts=lambda s: _accept(full_role(s))),
        offer("window", ops=KV, block_sizes=frozenset({64}), accepts=lambda s: _accept(not full_role(s))),
    )
    wants = needs(windows=(None, 8), denied_providers=frozenset({"reference"}), sites=kv_sites(needs))
    with pytest.raises(PlanError, match=r"no block size serves all KV groups \(group 0: 16; group 1: 64\)"):
        plan(wants, [candidate(offers=offers)], [])


def kv_sites(needs):
    return tuple(site for site in needs(windows=(None, 8)).sites if site.group is not None)


def test_an_offer_without_a_usable_layout_is_rejected(needs, candidate, offer):
    def fail(group, dtype, tokens_per_block):
        raise ValueError("odd head size")

    chosen = plan(needs(), [candidate(offers=(offer("fast", ops=KV, kv_layout=fail),))], [])
    assert bound(chosen)["kv_write", "kv.0.full"] == "reference"
    assert any("odd head size" in one.reason for one in chosen.rejected)


def test_a_model_without_kv_has_no_groups(needs, candidate):
    wants = needs(windows=())
    chosen = plan(wants, [candidate()], [])
    assert chosen.kv_groups == ()
    assert "block_size" not in chosen.reasons


@settings(deadline=None)  # a busy machine is no fault
@given(sizes=st.sets(st.sampled_from([8, 16, 32, 64, 128]), min_size=1))
def test_the_chosen_block_size_is_always_one_that_the_provider_has(needs, candidate, offer, sizes):
    only = offer("kv", ops=KV, block_sizes=frozenset(sizes))
    chosen = plan(needs(providers={"kv_write": "kv"}), [candidate(offers=(only,))], [])
    assert chosen.kv_groups[0].layout.tokens_per_block in sizes
