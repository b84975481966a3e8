"""Choosing with five plugins installed: two equal ones, one with kernels too old for its device, one that fails, a host.

Everything is installed as real distributions and collected as an engine would; the plan is that of a small model.
"""

from __future__ import annotations

import itertools
import sys

import pytest

from vllm_core.api import DeviceFacts
from vllm_core.errors import PlanError, PluginError, UnknownPlatformError
from vllm_core.registry.candidates import collect, names_in, narrow
from vllm_core.registry.discover import Found, find
from vllm_core.registry.explain import to_json, to_text
from vllm_core.registry.plan import Failed
from vllm_core.registry.select import plan

FIVE = ("dist-alpha", "dist-beta", "dist-old", "dist-broken", "dist-host")
NEW_DEVICE = (
    'return ProbeReport(devices=(DeviceFacts(id="GPU-0", name="Fake", device_type="old", architecture="sm_120", '
    'memory_kind="discrete", memory_bytes=8 << 30),), checks=(Check(name="driver", outcome="ok", detail="found"),))'
)


@pytest.fixture
def five(site, source):
    """Install the five. ``broken`` is the platform whose hardware the machine may show."""
    site.add("dist-alpha", {"alpha": source("alpha")})
    site.add("dist-beta", {"beta": source("beta", vendor="bolt")})
    old = source("old", probe=NEW_DEVICE, support_level="production")
    site.add("dist-old", {"old": old.replace("claims=CLAIMS,", 'claims=CLAIMS, architectures=("sm_80", "sm_90"),')})
    site.add("dist-broken", {"rocm": "raise ImportError('libbroken.so.1: cannot open shared object file')"})
    site.add("dist-host", {"plain": source("plain", device_class="host", support_level="production", vendor="host")})


@pytest.fixture
def choose(five, site, empty_root, needs):
    """Collect and plan; ``without`` leaves distributions out."""

    def run(platform=None, *, without=(), **changes):
        allowed = ",".join(name for name in FIVE if name not in without)
        environ = {**site.environ, "VLLM_CORE_PLUGINS": allowed}
        found, failed = collect(only=platform, environ=environ, root=empty_root)
        return plan(needs(platform=platform, **changes), found, failed)

    return run


@pytest.fixture
def visible(empty_root):
    """The hardware of the broken plugin can be seen."""
    (empty_root / "dev").mkdir()
    (empty_root / "dev/kfd").write_text("")


def rejected(chosen):
    return {one.candidate: one.reason for one in chosen.rejected if one.subject == "platform"}


def test_the_best_is_chosen_and_every_other_has_a_reason(choose):
    chosen = choose(allow_fallback=True)
    assert chosen.platform == "plain", "production before beta"
    reasons = rejected(chosen)
    assert "support level" in reasons["dist-alpha:alpha (fake1)"]
    assert "kernels are built for sm_80, sm_90, found sm_120" in reasons["dist-old:old (sm_120)"]
    assert "libbroken.so.1" in reasons["dist-broken:rocm"]


def test_the_plan_is_the_same_in_every_order_of_installation(five, site, empty_root, needs, monkeypatch):
    """Each distribution in a folder of its own: what is found, and what is chosen, does not depend on the folders' order."""
    folders = []
    for name in FIVE:
        folder = site.folder.parent / name
        folder.mkdir()
        (site.folder / f"{name.replace('-', '_')}-1.0.dist-info").rename(folder / f"{name.replace('-', '_')}-1.0.dist-info")
        folders.append(str(folder))
    environ = {**site.environ, "VLLM_CORE_PLUGINS": ",".join(FIVE)}
    path = list(sys.path)
    monkeypatch.setattr(sys, "path", [*folders, *path])
    found = find()
    candidates, failed = collect(environ=environ, root=empty_root)
    wanted = to_json(plan(needs(allow_fallback=True), candidates, failed))
    assert len(candidates) == 4
    for order in itertools.permutations(folders):
        monkeypatch.setattr(sys, "path", [*order, *path])
        assert find() == found
    for order in itertools.permutations(candidates):
        assert to_json(plan(needs(allow_fallback=True), order, failed)) == wanted


def test_a_tie_is_decided_by_name_and_reported(choose):
    chosen = choose(without=("dist-host", "dist-old"))
    assert chosen.platform == "alpha"
    assert any("tie with dist-beta:beta" in note for note in chosen.notes)


@pytest.mark.parametrize(
    ("name", "platform"), [("beta", "beta"), ("dist-alpha", "alpha"), ("bolt", "beta"), ("plain", "plain")]
)
def test_a_name_is_taken_before_any_rank(choose, name, platform):
    chosen = choose(name)
    assert chosen.platform == platform
    assert chosen.reasons["platform"] == f"asked for as {name!r}"


@pytest.mark.parametrize(
    ("names", "platform"),
    [
        ("beta,alpha", "beta"),
        ("alpha,beta", "alpha"),
        ("old,beta,plain", "beta"),
        ("rocm,beta", "beta"),
        ("cuda,beta", "beta"),
        (" bolt , alpha", "beta"),
    ],
)
def test_of_several_names_the_first_that_can_is_taken(choose, visible, names, platform):
    chosen = choose(names)
    assert chosen.platform == platform
    assert "of " in chosen.reasons["platform"]


def test_what_is_passed_over_in_a_list_is_said(choose, visible):
    chosen = choose("cuda,rocm,old,plain")
    notes = "\n".join(chosen.notes)
    assert "cuda was asked for and is not installed; fix: pip install ./plugins/vllm-triton ./plugins/vllm-cuda" in notes
    assert "dist-broken:rocm failed at import" in notes
    assert "sm_120" in rejected(chosen)["dist-old:old (sm_120)"]


def test_an_unknown_name_in_a_list_is_an_error_with_the_nearest(choose):
    with pytest.raises(UnknownPlatformError, match="did you mean 'beta'"):
        choose("alpha,betta")


@pytest.mark.parametrize("names", ["cuda,xpu", "rocm,cuda", ","])
def test_a_list_of_which_nothing_works_is_an_error(choose, names):
    with pytest.raises((UnknownPlatformError, PluginError)):
        choose(names)


@pytest.mark.parametrize("names", ["old", "old,rocm"])
def test_nothing_else_is_taken_than_what_was_named(choose, names):
    with pytest.raises(PlanError, match="kernels are built for sm_80, sm_90, found sm_120"):
        choose(names)


def test_a_list_imports_no_other_platform():
    found = [
        Found(distribution=f"d-{name}", version="1", entry_point=name, value="m") for name in ("a", "b", "c", "a.fast", "c.x")
    ]
    assert [one.entry_point for one in narrow(found, "b,a")] == ["a", "b", "a.fast"]
    assert [one.entry_point for one in narrow(found, "a,cuda")] == ["a", "a.fast"], "cuda is ours, and not installed"
    assert narrow(found, "a,acme") == found, "acme may be a vendor"
    assert names_in(" a,,b , a") == ("a", "b")


def test_a_failed_plugin_with_its_hardware_visible_is_an_error_and_not_the_host(choose, visible):
    with pytest.raises(PluginError, match=r"libbroken\.so\.1") as caught:
        choose(without=("dist-alpha", "dist-beta", "dist-old"))
    assert isinstance(caught.value.__cause__, ImportError)
    assert "--platform plain" in caught.value.fix


def test_the_host_may_be_named_or_allowed_then(choose, visible):
    assert choose("plain").platform == "plain"
    assert choose(allow_fallback=True, without=("dist-old",)).platform == "plain"


def test_hardware_without_its_plugin_is_said_where_the_host_is_taken(choose, empty_root, without_ascend):
    (empty_root / "dev").mkdir()
    (empty_root / "dev/davinci0").write_text("")
    chosen = choose(without=("dist-alpha", "dist-beta", "dist-old", "dist-broken"))
    assert chosen.platform == "plain"
    assert any("./plugins/vllm-ascend (in a checkout)" in note for note in chosen.notes)


def test_a_device_newer_than_the_kernels_forbids_the_host_and_names_both(choose):
    with pytest.raises(PlanError, match="kernels are built for sm_80, sm_90, found sm_120"):
        choose(without=("dist-alpha", "dist-beta"))


@pytest.mark.parametrize(
    ("wish", "provider"),
    [
        ({}, "alpha"),
        ({"providers": {"all": "reference"}}, "reference"),
        ({"providers": {"rms_norm": "reference"}}, "reference"),
        ({"denied_providers": frozenset({"alpha"})}, "reference"),
        ({"providers": {"all": "reference", "rms_norm": "alpha"}}, "alpha"),
    ],
)
def test_providers_are_forced_and_denied(choose, wish, provider):
    chosen = choose("alpha", **wish)
    assert chosen.binding("rms_norm", "norm").provider == provider
    assert {one.provider for one in chosen.bindings if one.op != "rms_norm"} == {"reference"}


def test_an_unknown_provider_is_an_error_with_the_nearest(choose):
    with pytest.raises(PlanError, match="did you mean 'alpha'"):
        choose("alpha", denied_providers=frozenset({"alfa"}))


def test_a_probe_that_takes_too_long_is_a_failure_of_its_own(site, source, empty_root, needs):
    """Thirty seconds against a limit of three: the others are not held up by more than the limit, and are chosen from."""
    site.add("dist-slow", {"slow": source("slow", probe="import time; time.sleep(30)", support_level="production")})
    site.add("dist-alpha", {"alpha": source("alpha")})
    environ = {**site.environ, "VLLM_CORE_PLUGINS": "dist-slow,dist-alpha", "VLLM_CORE_PROBE_TIMEOUT_S": "3"}
    chosen = plan(needs(), *collect(environ=environ, root=empty_root))
    assert chosen.platform == "alpha"
    assert "no answer within 3 s" in rejected(chosen)["dist-slow:slow"]
    assert any("VLLM_CORE_PROBE_TIMEOUT_S" in note for note in chosen.notes)


MIG = "MIG-3f1a9a52-0c7e-5a3b-9d3e-0a1b2c3d4e5f"
GPU = "GPU-7b5d0c1e-9f3a-4c55-8e21-aa11bb22cc33"


def facts(one, architecture="fake1", memory=8, **changes):
    return DeviceFacts(
        id=one,
        name="Fake",
        device_type="fake",
        architecture=architecture,
        memory_kind="discrete",
        memory_bytes=memory << 30,
        **changes,
    )


@pytest.mark.parametrize("wanted", [MIG, GPU])
def test_device_ids_are_opaque(needs, candidate, wanted):
    devices = (facts(MIG, memory=4), facts(GPU, memory=80))
    chosen = plan(needs(device_ids=(wanted,)), [candidate(devices=devices)], [])
    assert (chosen.device.id, chosen.device.memory_bytes >> 30) == (wanted, 4 if wanted == MIG else 80)
    assert wanted in to_text(chosen)


def test_an_index_is_no_other_name_for_an_opaque_id(needs, candidate):
    with pytest.raises(PlanError, match=f"wanted 0, found {MIG}"):
        plan(needs(device_ids=("0",)), [candidate(devices=(facts(MIG),))], [])


def test_devices_of_two_architectures_are_judged_each_by_its_own(needs, candidate):
    """One platform, an old display card first: its kernels are for the other one, and that one is taken."""
    built = {"architectures": ("sm_90",)}
    old, new = candidate(devices=(facts("a", "sm_75", memory=96),), **built), candidate(devices=(facts("b", "sm_90"),), **built)
    for order in ((old, new), (new, old)):
        chosen = plan(needs(), list(order), [])
        assert chosen.device.id == "b"
        assert "found sm_75" in rejected(chosen)["vllm-fake:fake (sm_75)"]
    with pytest.raises(PlanError, match="found sm_75"):
        plan(needs(device_ids=("a",)), [old, new], [])


def test_the_conformance_level_decides_between_equal_support_levels(needs, candidate):
    proved, claimed = candidate("b", conformance_level=4), candidate("a", conformance_level=2)
    chosen = plan(needs(), [claimed, proved], [])
    assert chosen.platform == "b"
    assert "conformance level" in chosen.reasons["platform"]
    better = candidate("c", support_level="production")
    assert plan(needs(), [claimed, proved, better], []).platform == "c"


def test_several_that_work_are_no_error(needs, candidate):
    """field-reports 2: "only one platform plugin can be activated" on a host that had two."""
    chosen = plan(needs(), [candidate("cuda"), candidate("cpu", device_class="host")], [])
    assert chosen.platform == "cuda"
    assert "best of 2 by device class" in chosen.reasons["platform"]


def test_nothing_usable_is_an_error_that_has_every_probes_result_and_hint(needs, candidate):
    """field-reports 3: "failed to infer device type", with the reasons at DEBUG alone."""
    stale = Failed(distribution="d", entry_point="e", stage="import", cause="OSError: libe.so.2", fix="reinstall d")
    with pytest.raises(PlanError, match=r"(?s)libfake\.so\.1.*libe\.so\.2") as caught:
        plan(needs(), [candidate(devices=())], [stale])
    assert "reinstall d" in caught.value.fix


def test_a_hint_of_a_probe_is_the_fix_where_nothing_else_failed(needs, candidate):
    """field-reports 3: the container was started without its vendor's runtime, and nothing said so."""
    with pytest.raises(PlanError) as caught:
        plan(needs(), [candidate(devices=(), hint="start the container with --device")], [])
    assert caught.value.fix == "start the container with --device"


def test_a_version_string_says_nothing_about_the_hardware(site, source, empty_root, needs):
    """field-reports 4: a package whose version had "cpu" in it was taken for the CPU's."""
    site.add("dist-alpha", {"alpha": source("alpha")}, version="1.0+cpu")
    environ = {**site.environ, "VLLM_CORE_PLUGINS": "dist-alpha"}
    assert plan(needs(), *collect(environ=environ, root=empty_root)).platform == "alpha"


def test_one_failed_check_of_a_probe_does_not_hide_its_devices(needs, candidate, site, source, empty_root):
    """field-reports 5: the management library was down and the driver worked; the device was not seen."""
    probe = (
        'return ProbeReport(devices=(DeviceFacts(id="0", name="Fake", device_type="alpha", architecture="fake1", '
        'memory_kind="unified", memory_bytes=8 << 30),), checks=(Check(name="management library", outcome="failed", '
        'detail="not reachable, driver used", hint="install it"),))'
    )
    site.add("dist-alpha", {"alpha": source("alpha", probe=probe)})
    environ = {**site.environ, "VLLM_CORE_PLUGINS": "dist-alpha"}
    assert plan(needs(), *collect(environ=environ, root=empty_root)).device.memory_kind == "unified"
