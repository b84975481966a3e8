from __future__ import annotations

import pytest

from vllm_core.api.ops import family_of
from vllm_core.errors import PlanError
from vllm_core.registry.demotion import demote
from vllm_core.registry.select import plan

KV = family_of("kv_write")


@pytest.fixture
def chosen(needs, candidate, offer):
    return plan(needs(windows=(None, 8)), [candidate(offers=(offer("fast", ops=KV),))], [])


def test_a_demoted_kv_family_takes_the_layout_of_its_new_provider(chosen):
    after = demote(chosen, "paged_attention", "kv.0.full", "RuntimeError: boom")
    assert {one.provider for one in after.bindings if one.role == "kv.0.full"} == {"reference"}
    assert after.kv_groups[0].layout.layout_id != "fake"
    assert after.kv_groups[0].fallbacks == ()


def test_a_demotion_leaves_the_other_group_alone(chosen):
    after = demote(chosen, "kv_write", "kv.0.full", "boom")
    assert {one.provider for one in after.bindings if one.role == "kv.1.window"} == {"fast"}
    assert after.kv_groups[1] == chosen.kv_groups[1]


def test_a_demotion_is_recorded_for_each_op_of_the_family(chosen):
    after = demote(chosen, "kv_write", "kv.0.full", "boom")
    assert {one.op for one in after.demotions} == set(KV)
    assert {(one.provider, one.replacement, one.cause) for one in after.demotions} == {("fast", "reference", "boom")}


def test_demoting_a_part_of_a_fused_op_leaves_the_layout_alone(needs, candidate, offer):
    unfused = tuple(op for op in KV if op != "qk_norm_rope_kv_write")
    made = plan(needs(), [candidate(offers=(offer("fast", ops=unfused), offer("norms")))], [])
    after = demote(made, "rms_norm", "kv.0.full", "boom")
    assert after.binding("rms_norm", "kv.0.full").provider == "reference"
    assert after.kv_groups == made.kv_groups


def test_nobody_left_is_an_error_with_the_cause(chosen):
    after = demote(chosen, "kv_write", "kv.0.full", "boom")
    with pytest.raises(PlanError, match="second boom"):
        demote(after, "kv_write", "kv.0.full", "second boom")
