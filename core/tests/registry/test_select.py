from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_core.api import DeviceFacts, NotImplementedYet, Partial, Rejected, Unsupported, Versioned
from vllm_core.api.ops import family_of
from vllm_core.errors import PlanError, PluginError, UnknownPlatformError
from vllm_core.registry.explain import to_json
from vllm_core.registry.plan import Failed
from vllm_core.registry.select import plan

KV = family_of("kv_write")
KV_UNFUSED = tuple(op for op in KV if op != "qk_norm_rope_kv_write")


def failure(entry_point="accel", stage="import", **changes):
    values = {"distribution": f"vllm-{entry_point}", "cause": "ImportError: libaccel.so.1", "fix": "reinstall it"}
    return Failed(entry_point=entry_point, stage=stage, **{**values, **changes})


def device(**changes):
    values = {
        "id": "d",
        "name": "n",
        "device_type": "t",
        "architecture": "fake1",
        "memory_kind": "discrete",
        "memory_bytes": 1 << 30,
    }
    return DeviceFacts(**{**values, **changes})


# Which platform


def test_without_any_platform_the_error_says_so(needs):
    with pytest.raises(PlanError, match="no platform is installed"):
        plan(needs(), [], [])


def test_a_named_platform_is_taken_whatever_its_rank(needs, candidate):
    candidates = [candidate("best", support_level="production"), candidate("asked", support_level="experimental")]
    assert plan(needs(platform="asked"), candidates, []).platform == "asked"


@pytest.mark.parametrize("name", ["fake", "vllm-fake", "vllm-fake:fake", "acme"])
def test_a_platform_answers_to_name_distribution_key_and_vendor(needs, candidate, name):
    assert plan(needs(platform=name), [candidate()], []).platform == "fake"


def test_an_unknown_platform_is_an_error_with_the_installed_and_the_nearest(needs, candidate):
    with pytest.raises(UnknownPlatformError, match="did you mean 'fake'") as caught:
        plan(needs(platform="fakee"), [candidate()], [])
    assert "fake" in caught.value.expected


@pytest.mark.parametrize("name", ["cuda", "vllm-cuda"])
def test_a_platform_of_ours_is_to_be_installed_not_taken_for_a_near_name(needs, candidate, name):
    with pytest.raises(UnknownPlatformError) as caught:
        plan(needs(platform=name), [candidate(name="cpu")], [])
    assert caught.value.fix.startswith("pip install ./plugins/vllm-triton ./plugins/vllm-cuda")


def test_a_named_platform_that_failed_raises_its_cause(needs, candidate):
    cause = OSError("libaccel.so.1")
    with pytest.raises(PluginError, match=r"import: ImportError: libaccel\.so\.1") as caught:
        plan(needs(platform="accel"), [candidate()], [failure(error=cause)])
    assert caught.value.__cause__ is cause


def test_a_named_platform_that_is_not_installed_says_how_to_install_it(needs, candidate):
    missing = failure(stage="missing", fix="pip install ./plugins/vllm-accel")
    with pytest.raises(UnknownPlatformError, match=r"pip install \./plugins/vllm-accel"):
        plan(needs(platform="accel"), [candidate()], [missing])


@pytest.mark.parametrize(
    ("better", "worse", "criterion"),
    [
        ({"support_level": "production", "device_class": "host"}, {"support_level": "beta"}, "support level"),
        ({}, {"device_class": "host"}, "device class"),
        ({"devices": (device(memory_bytes=2 << 30),)}, {"devices": (device(memory_bytes=1 << 30),)}, "memory"),
        ({}, {}, "name"),
    ],
)
def test_platforms_are_ordered_by_level_then_class_then_memory_then_name(needs, candidate, better, worse, criterion):
    chosen = plan(needs(), [candidate("b", **worse), candidate("a", **better)], [])
    assert chosen.platform == "a"
    assert criterion in chosen.reasons["platform"]
    (other,) = [one for one in chosen.rejected if one.subject == "platform"]
    assert "vllm-b:b" in other.candidate
    assert criterion in other.reason


def test_a_tie_is_reported(needs, candidate):
    chosen = plan(needs(), [candidate("b"), candidate("a")], [])
    assert any("tie with vllm-b:b" in note for note in chosen.notes)


def test_a_host_that_ranks_before_an_accelerator_is_reported(needs, candidate):
    host = candidate("host", device_class="host", support_level="production")
    assert any("ranks before vllm-fake" in note for note in plan(needs(), [candidate(), host], []).notes)


LEVELS = st.sampled_from(["production", "beta", "experimental"])
CLASSES = st.sampled_from(["accelerator", "host"])


@settings(deadline=None)  # a busy machine is no fault
@given(rows=st.lists(st.tuples(LEVELS, CLASSES, st.integers(1, 3)), min_size=1, max_size=4), order=st.randoms())
def test_the_plan_does_not_depend_on_the_order_of_the_candidates(needs, candidate, rows, order):
    candidates = [
        candidate(f"p{i}", support_level=level, device_class=kind, devices=(device(memory_bytes=memory),))
        for i, (level, kind, memory) in enumerate(rows)
    ]
    first = to_json(plan(needs(), candidates, []))
    order.shuffle(candidates)
    assert to_json(plan(needs(), candidates, [])) == first


@settings(deadline=None)  # a busy machine is no fault
@given(rows=st.lists(st.tuples(LEVELS, CLASSES, st.integers(1, 3)), min_size=2, max_size=4))
def test_nobody_better_in_an_earlier_criterion_is_passed_over(needs, candidate, rows):
    candidates = {
        f"p{i}": candidate(f"p{i}", support_level=level, device_class=kind, devices=(device(memory_bytes=memory),))
        for i, (level, kind, memory) in enumerate(rows)
    }
    chosen = candidates[plan(needs(), list(candidates.values()), []).platform]
    levels = ["production", "beta", "experimental"]
    for other in candidates.values():
        assert levels.index(chosen.manifest.support_level) <= levels.index(other.manifest.support_level)
        if chosen.manifest.support_level == other.manifest.support_level:
            assert (chosen.manifest.device_class, other.manifest.device_class) != ("host", "accelerator")


# No silent host


def test_a_failed_plugin_with_visible_hardware_forbids_the_host(needs, candidate):
    host = candidate("host", device_class="host")
    with pytest.raises(PluginError, match=r"libaccel\.so\.1") as caught:
        plan(needs(), [host], [failure(visible_hardware=True)])
    assert "--allow-fallback" in caught.value.fix
    assert "--platform host" in caught.value.fix


@pytest.mark.parametrize("wish", [{"allow_fallback": True}, {"platform": "host"}])
def test_the_host_may_be_asked_for_and_the_failure_is_noted(needs, candidate, wish):
    chosen = plan(needs(**wish), [candidate("host", device_class="host")], [failure(visible_hardware=True)])
    assert chosen.platform == "host"
    assert any("vllm-accel:accel failed at import" in note for note in chosen.notes)


def test_a_failed_plugin_without_visible_hardware_is_noted_alone(needs, candidate):
    chosen = plan(needs(), [candidate("host", device_class="host")], [failure()])
    assert any("reinstall it" in note for note in chosen.notes)
    assert any(one.candidate == "vllm-accel:accel" for one in chosen.rejected)


def test_a_failed_plugin_does_not_stop_another_accelerator(needs, candidate):
    assert plan(needs(), [candidate()], [failure(visible_hardware=True)]).platform == "fake"


def test_hardware_without_a_plugin_is_a_note_with_the_install_command(needs, candidate):
    missing = failure(stage="missing", visible_hardware=True, cause="Accel seen", fix="pip install ./plugins/vllm-accel")
    chosen = plan(needs(), [candidate("host", device_class="host")], [missing])
    assert chosen.notes == ("Accel seen; fix: pip install ./plugins/vllm-accel",)
    assert plan(needs(platform="host"), [candidate("host", device_class="host")], [missing]).notes == ()


def test_an_accelerator_that_cannot_run_the_model_forbids_the_host(needs, candidate):
    accelerator = candidate(claims={"dtype.float32": Unsupported("no such unit")})
    host = candidate("host", device_class="host")
    with pytest.raises(PlanError, match="no such unit"):
        plan(needs(), [accelerator, host], [])
    assert plan(needs(allow_fallback=True), [accelerator, host], []).platform == "host"


def test_an_accelerator_package_without_its_device_permits_the_host(needs, candidate):
    chosen = plan(needs(), [candidate(devices=()), candidate("host", device_class="host")], [])
    assert chosen.platform == "host"
    assert any("libfake.so.1" in one.reason for one in chosen.rejected)


# What the model needs


@pytest.mark.parametrize("support", [Unsupported("by design"), NotImplementedYet("issue 7")])
def test_a_capability_that_is_absent_rejects_the_platform_with_the_claim(needs, candidate, support):
    with pytest.raises(PlanError, match=r"attention\.decoder is .*(by design|issue 7)"):
        plan(needs(), [candidate(claims={"attention.decoder": support})], [])


def test_every_missing_capability_is_named_at_once(needs, candidate):
    claims = {"attention.decoder": Unsupported("a"), "dtype.float32": Unsupported("b")}
    with pytest.raises(PlanError, match=r"(?s)attention\.decoder.*dtype\.float32"):
        plan(needs(), [candidate(claims=claims)], [])


def test_a_partial_claim_is_available(needs, candidate):
    assert plan(needs(), [candidate(claims={"attention.decoder": Partial("r", ("c",))})], []).platform == "fake"


@pytest.mark.parametrize(("version", "fits"), [("560.3", True), ("550", True), ("535.1", False), ("", False), ("x", False)])
def test_a_versioned_claim_is_held_against_the_driver(needs, candidate, version, fits):
    one = candidate(claims={"attention.decoder": Versioned("driver>=550")}, devices=(device(driver_version=version),))
    if fits:
        assert plan(needs(), [one], []).platform == "fake"
    else:
        with pytest.raises(PlanError, match="needs driver>=550"):
            plan(needs(), [one], [])


def test_a_kv_dtype_without_claim_is_refused_with_the_accepted_ones(needs, candidate):
    claims = {"kv_dtype.fp8": Unsupported("no fp8"), "kv_dtype.int8": Unsupported("x"), "dtype.float16": Unsupported("x")}
    with pytest.raises(PlanError, match="wanted fp8_e4m3, accepted float32, bfloat16"):
        plan(needs(kv_dtype="fp8_e4m3"), [candidate(claims=claims)], [])


def test_kernels_built_for_another_architecture_reject_the_platform(needs, candidate):
    with pytest.raises(PlanError, match="built for fake7, fake8, found fake1"):
        plan(needs(), [candidate(architectures=("fake7", "fake8"))], [])


def test_graphs_are_used_where_claimed_and_not_where_absent(needs, candidate):
    absent = candidate(claims={"graphs": Unsupported("none")})
    assert plan(needs(), [candidate()], []).graphs
    assert not plan(needs(graphs=False), [candidate()], []).graphs
    assert not plan(needs(), [absent], []).graphs
    with pytest.raises(PlanError, match="graphs were asked for"):
        plan(needs(graphs=True), [absent], [])


def test_a_named_device_is_taken(needs, candidate):
    devices = (device(id="a", memory_bytes=9), device(id="b", memory_bytes=1))
    assert plan(needs(), [candidate(devices=devices)], []).device.id == "a"
    assert plan(needs(device_ids=("b",)), [candidate(devices=devices)], []).device.id == "b"


def test_an_unknown_device_is_refused_with_those_that_are_there(needs, candidate):
    with pytest.raises(PlanError, match="wanted z, found dev-0"):
        plan(needs(device_ids=("z",)), [candidate()], [])


def test_several_devices_are_refused_with_advice(needs, candidate):
    with pytest.raises(PlanError, match="router"):
        plan(needs(device_ids=("a", "b")), [candidate()], [])


# Who serves each call site


def bound(chosen):
    return {(one.op, one.role): one.provider for one in chosen.bindings}


def test_every_call_site_is_bound_by_the_reference_if_nobody_else_offers(needs, candidate):
    wants = needs(windows=(None, 8))
    chosen = plan(wants, [candidate()], [])
    assert set(bound(chosen)) == {(site.op, site.role) for site in wants.sites}
    assert {one.kind for one in chosen.bindings} == {"reference"}


def test_the_highest_priority_that_accepts_is_chosen_and_the_rest_are_fallbacks(needs, candidate, offer):
    offers = (offer("low", priority=1), offer("high", priority=9), offer("picky", priority=99, dtypes=frozenset({"int4"})))
    chosen = plan(needs(), [candidate(offers=offers)], [])
    binding = chosen.binding("rms_norm", "norm")
    assert binding.provider == "high"
    assert [name for name, _, _ in binding.fallbacks] == ["low", "reference"]
    (rejected,) = [one for one in chosen.rejected if one.candidate == "picky"]
    assert rejected.reason == "rms_norm: dtype: wanted float32, supported int4"


def test_a_family_is_chosen_whole(needs, candidate, offer):
    chosen = plan(needs(), [candidate(offers=(offer("part", ops=("linear",), priority=99),))], [])
    assert bound(chosen)["linear", "linear"] == "reference"
    assert bound(chosen)["linear_pack", "linear"] == "reference"
    assert any(one.candidate == "part" and "linear_pack is missing" in one.reason for one in chosen.rejected)


def test_a_family_may_lack_a_fused_op_that_has_a_decomposition(needs, candidate, offer):
    chosen = plan(needs(), [candidate(offers=(offer("fast", ops=KV_UNFUSED),))], [])
    assert bound(chosen)["kv_write", "kv.0.full"] == "fast"
    assert ("qk_norm_rope_kv_write", "kv.0.full") not in bound(chosen)


def test_the_parts_of_a_fused_op_that_is_lacking_are_bound_where_it_would_be(needs, candidate, offer):
    chosen = plan(needs(), [candidate(offers=(offer("fast", ops=KV_UNFUSED), offer("norms")))], [])
    parts = {op: provider for (op, role), provider in bound(chosen).items() if role == "kv.0.full"}
    assert (parts["rms_norm"], parts["rotary_embedding"], parts["kv_write"]) == ("norms", "reference", "fast")


def test_groups_may_have_different_providers(needs, candidate, offer):
    full_only = offer("fast", ops=KV, features=frozenset({"soft_cap", "interleaved"}))
    chosen = plan(needs(windows=(None, 8)), [candidate(offers=(full_only,))], [])
    assert bound(chosen)["paged_attention", "kv.0.full"] == "fast"
    assert bound(chosen)["paged_attention", "kv.1.window"] == "reference"
    assert [group.layout.layout_id == "fake" for group in chosen.kv_groups] == [True, False]


def test_an_op_of_another_schema_version_is_refused(needs, candidate, offer):
    chosen = plan(needs(), [candidate(offers=(offer("old", op_versions={"rms_norm": 0}),))], [])
    assert bound(chosen)["rms_norm", "norm"] == "reference"


def test_accepts_has_the_last_word_and_may_fail_without_harm(needs, candidate, offer):
    def refuse(site):
        return Rejected("mood", "good", "bad")

    def fail(site):
        raise ZeroDivisionError("oops")

    offers = (offer("refuses", accepts=refuse), offer("fails", accepts=fail))
    chosen = plan(needs(), [candidate(offers=offers)], [])
    reasons = {one.candidate: one.reason for one in chosen.rejected}
    assert "mood: wanted good, supported bad" in reasons["refuses"]
    assert "ZeroDivisionError: oops" in reasons["fails"]


def test_a_forced_provider_is_used_and_has_no_fallbacks(needs, candidate, offer):
    offers = (offer("a", priority=1), offer("b", priority=9))
    binding = plan(needs(providers={"rms_norm": "a"}), [candidate(offers=offers)], []).binding("rms_norm", "norm")
    assert (binding.provider, binding.fallbacks) == ("a", ())


def test_all_reference_is_the_generic_path_and_one_op_can_differ(needs, candidate, offer):
    wants = needs(providers={"all": "reference", "rms_norm": "fast"})
    chosen = plan(wants, [candidate(offers=(offer(), offer("fast", ops=KV)))], [])
    assert {op for (op, _), provider in bound(chosen).items() if provider == "fast"} == {"rms_norm"}


def test_a_forced_provider_that_refuses_raises_its_reason(needs, candidate, offer):
    offers = (offer("a", dtypes=frozenset({"bfloat16"})),)
    with pytest.raises(PlanError, match="dtype: wanted float32, supported bfloat16"):
        plan(needs(providers={"rms_norm": "a"}), [candidate(offers=offers)], [])


def test_a_forced_provider_that_does_not_offer_the_op_raises(needs, candidate, offer):
    with pytest.raises(PlanError, match="forced, but not offered; offered by: reference"):
        plan(needs(providers={"linear": "fast"}), [candidate(offers=(offer(),))], [])


@pytest.mark.parametrize(
    "wish", [{"providers": {"rms_nrm": "fast"}}, {"providers": {"rms_norm": "fsat"}}, {"denied_providers": frozenset({"fsat"})}]
)
def test_an_unknown_name_in_a_provider_option_is_an_error_with_the_nearest(needs, candidate, offer, wish):
    with pytest.raises(PlanError, match=r"did you mean '(fast|rms_norm)'"):
        plan(needs(**wish), [candidate(offers=(offer(),))], [])


def test_one_family_cannot_be_forced_to_two_providers(needs, candidate, offer):
    wants = needs(providers={"kv_write": "fast", "paged_attention": "reference"})
    with pytest.raises(PlanError, match="share a private layout"):
        plan(wants, [candidate(offers=(offer("fast", ops=KV),))], [])


def test_a_denied_provider_is_neither_chosen_nor_a_fallback(needs, candidate, offer):
    chosen = plan(needs(denied_providers=frozenset({"fast"})), [candidate(offers=(offer(),))], [])
    binding = chosen.binding("rms_norm", "norm")
    assert (binding.provider, binding.fallbacks) == ("reference", ())
    assert any(one.candidate == "fast" and one.reason == "denied by the user" for one in chosen.rejected)


def test_strict_leaves_no_fallback(needs, candidate, offer):
    chosen = plan(needs(strict=True), [candidate(offers=(offer(),))], [])
    assert all(not one.fallbacks for one in chosen.bindings)


def test_where_references_do_not_run_a_missing_op_rejects_the_plan(needs, candidate):
    with pytest.raises(PlanError, match=r"nobody serves rms_norm at norm.*--allow-host-ops"):
        plan(needs(), [candidate(eager_full=False)], [])


def test_allowed_host_ops_are_bound_as_host(needs, candidate, offer):
    one = candidate(eager_full=False, offers=(offer(),))
    chosen = plan(needs(allow_host_ops=True), [one], [])
    assert chosen.binding("rms_norm", "norm").kind == "kernel"
    assert chosen.binding("add_rms_norm", "norm").kind == "host"


# Purity


def test_equal_inputs_give_equal_bytes(needs, candidate, offer):
    offers = (offer("a", priority=3), offer("b", priority=3), offer("kv", ops=KV))
    made = [
        to_json(plan(needs(windows=(None, 8)), [candidate(offers=order), candidate("other")], [failure()]))
        for order in itertools.permutations(offers)
    ]
    assert len(set(made)) == 1


def test_planning_changes_no_input(needs, candidate, offer):
    wants, one = needs(providers={"rms_norm": "fast"}), candidate(offers=(offer(),))
    before = (replace(wants), replace(one))
    plan(wants, [one], [])
    assert (wants, one) == before
