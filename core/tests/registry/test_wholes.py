"""Ops that stand in for others: nobody need serve them, and a plan goes on without them."""

from __future__ import annotations

import pytest

from vllm_core.api import CallSite
from vllm_core.errors import PlanError
from vllm_core.registry.demotion import demote
from vllm_core.registry.select import plan

ROLE = "kv.0.full"


@pytest.fixture
def asking(needs):
    """Needs of a model whose layers `decode_layers` may run."""

    def make(**changes):
        plain = needs()
        site = CallSite(op="decode_layers", role=ROLE, dtype="float32", group=0, kv_dtype="float32", head_size=64)
        return needs(sites=(*plain.sites, site), **changes)

    return make


def test_a_plan_needs_nobody_for_it(asking, candidate):
    made = plan(asking(), [candidate()], [])
    assert made.binding("decode_layers", ROLE) is None
    assert made.binding("paged_attention", ROLE).provider == "reference"


def test_who_offers_it_serves_it_and_the_reason_has_the_note(asking, candidate, offer):
    made = plan(asking(), [candidate(offers=(offer("whole", ops=("decode_layers",), note="of few rows"),))], [])
    assert made.binding("decode_layers", ROLE).provider == "whole"
    assert made.binding("paged_attention", ROLE).provider == "reference"
    assert made.reasons["provider of decode_layers at kv.0.full"] == "whole: first of 1 accepted, 0 rejected; of few rows"


def test_why_an_offer_was_left_out_is_told(asking, candidate, offer):
    made = plan(asking(), [candidate(offers=(offer("whole", ops=("decode_layers",), dtypes=frozenset({"bfloat16"})),))], [])
    assert made.binding("decode_layers", ROLE) is None
    assert any(one.candidate == "whole" and "dtype: wanted float32" in one.reason for one in made.rejected)


def test_a_provider_that_the_user_names_must_serve_it(asking, candidate, offer):
    only = candidate(offers=(offer("whole", ops=("decode_layers",), dtypes=frozenset({"bfloat16"})),))
    with pytest.raises(PlanError, match="decode_layers"):
        plan(asking(providers={"decode_layers": "whole"}), [only], [])


def test_after_a_failure_the_others_take_its_place(asking, candidate, offer):
    made = plan(asking(), [candidate(offers=(offer("whole", ops=("decode_layers",)),))], [])
    after = demote(made, "decode_layers", ROLE, "RuntimeError: boom")
    assert after.binding("decode_layers", ROLE) is None
    assert [one for one in made.bindings if one.op != "decode_layers"] == list(after.bindings)
    (demotion,) = after.demotions
    assert (demotion.provider, demotion.replacement, demotion.cause) == (
        "whole",
        "the ops that it stands for",
        "RuntimeError: boom",
    )
