"""A provider that fails gives way to the next accepted one, with its whole family, and the Plan says so."""

import pytest

from vllm_core.api import DeviceFacts
from vllm_core.errors import PlanError
from vllm_core.registry.demotion import demote
from vllm_core.registry.plan import Binding, Plan

FACTS = DeviceFacts(id="0", name="d", device_type="t", architecture="a", memory_kind="host", memory_bytes=1)


def bind(op: str, role: str, provider: str, *fallbacks: str) -> Binding:
    others = tuple((name, f"{name}:{op}", "reference") for name in fallbacks)
    return Binding(op=op, role=role, provider=provider, entry=f"{provider}:{op}", kind="kernel", fallbacks=others)


def plan(*bindings: Binding) -> Plan:
    return Plan(
        platform="p",
        distribution="d",
        distribution_version="1",
        entry_point="p",
        support_level="beta",
        device=FACTS,
        model="m",
        architecture="A",
        track="agnostic",
        program="composed",
        dtype="float32",
        kv_dtype="float32",
        bindings=bindings,
        kv_groups=(),
        graphs=False,
    )


def test_the_next_accepted_provider_takes_over_and_the_plan_records_it() -> None:
    after = demote(plan(bind("rms_norm", "norm", "fast", "slow", "reference")), "rms_norm", "norm", "boom")
    assert (after.bindings[0].provider, after.bindings[0].entry) == ("slow", "slow:rms_norm")
    (demotion,) = after.demotions
    assert (demotion.provider, demotion.replacement, demotion.cause) == ("fast", "slow", "boom")


def test_a_family_is_demoted_together_but_only_in_its_own_role() -> None:
    before = plan(
        bind("kv_write", "kv.0.full", "fast", "reference"),
        bind("paged_attention", "kv.0.full", "fast", "reference"),
        bind("paged_attention", "kv.1.window", "fast", "reference"),
        bind("rms_norm", "norm", "fast", "reference"),
    )
    after = demote(before, "paged_attention", "kv.0.full", "boom")
    assert [b.provider for b in after.bindings] == ["reference", "reference", "fast", "fast"]
    assert len(after.demotions) == 2


def test_a_provider_without_a_replacement_is_an_error_with_the_cause() -> None:
    with pytest.raises(PlanError) as caught:
        demote(plan(bind("rms_norm", "norm", "only")), "rms_norm", "norm", "boom at shape 3")
    assert "boom at shape 3" in caught.value.found


def test_demotions_add_up() -> None:
    once = demote(plan(bind("rms_norm", "norm", "a", "b", "c")), "rms_norm", "norm", "first")
    twice = demote(once, "rms_norm", "norm", "second")
    assert [d.cause for d in twice.demotions] == ["first", "second"]
    assert twice.bindings[0].provider == "c"
