from __future__ import annotations

import pytest

from vllm_core.api.ops import OPS, WHOLES
from vllm_core.registry.candidates import collect, narrow, reference_offers, requested
from vllm_core.registry.discover import Found


@pytest.fixture
def collecting(site, empty_root):
    """Collect from the site's plugins alone."""

    def run(only=None, root=empty_root, **environ):
        names = {f.name.partition("-1.0.dist-info")[0].replace("_", "-") for f in site.folder.glob("*.dist-info")}
        allowed = ",".join(sorted(names & site_plugins(site)))
        return collect(only=only, environ={**site.environ, "VLLM_CORE_PLUGINS": allowed, **environ}, root=root)

    return run


def site_plugins(site):
    return {
        folder.name.partition("-1.0.dist-info")[0].replace("_", "-")
        for folder in site.folder.glob("*.dist-info")
        if (folder / "entry_points.txt").exists()
    }


def of_site(failed):
    return {one.key: one for one in failed if one.stage != "foreign"}


def platforms(candidates):
    return [f"{one.distribution}:{one.entry_point}" for one in candidates]


def test_every_hostile_plugin_is_reported_and_hides_no_good_one(site, source, collecting):
    good = source("good")
    site.add("dist-import", {"a": "raise ImportError('stale')"})
    site.add("dist-hang", {"b": source("b", probe="import time; time.sleep(600)")})
    site.add("dist-crash", {"c": source("c", probe="import ctypes; ctypes.string_at(0)")})
    site.add("dist-signature", {"d": source("d").replace("def start(device)", "def start(gerät)")})
    site.add("dist-major", {"e": source("e", api_version="3.0")})
    site.add("dist-claims", {"f": source("f", setup="del CLAIMS['sleep']")})
    site.add("dist-range", {"g": source("g", core_range=">=7")})
    site.add("dist-hook", {"h": source("h").replace("@hookimpl\ndef probe", "def probe")})
    site.add("dist-offers", {"i": source("i", offers="Offer(provider='p', ops={'nope': 'm:f'})")})
    site.add("dist-good", {"good": good})
    site.add("dist-good-2", {"good": good})
    candidates, failed = collecting(VLLM_CORE_PROBE_TIMEOUT_S="5")
    assert platforms(candidates) == ["dist-good-2:good", "dist-good:good"]
    reported = of_site(failed)
    expected = {
        "dist-import:a": ("import", "stale"),
        "dist-hang:b": ("probe", "no answer"),
        "dist-crash:c": ("probe", "SIGSEGV"),
        "dist-signature:d": ("hooks", "gerät"),
        "dist-major:e": ("version", "3.0"),
        "dist-claims:f": ("claims", "sleep"),
        "dist-range:g": ("version", ">=7"),
        "dist-hook:h": ("hooks", "'probe'"),
        "dist-offers:i": ("offers", "'nope'"),
    }
    assert set(reported) == set(expected)
    for key, (stage, cause) in expected.items():
        assert reported[key].stage == stage
        assert cause in reported[key].cause
        assert reported[key].fix


@pytest.mark.parametrize("name", ["wanted", "dist-a", "dist-a:wanted"])
def test_a_forced_platform_imports_no_other(site, source, name):
    (wanted,) = site.add("dist-a", {"wanted": source("wanted")})
    (other,) = site.add("dist-b", {"other": source("other")})
    (kernels,) = site.add("dist-c", {"other.fast": source("other")})
    code = (
        "import json, os, sys\nfrom vllm_core.registry.candidates import collect\n"
        "candidates, failed = collect(environ=os.environ)\n"
        f"mine = {[wanted, other, kernels]!r}\n"
        "print(json.dumps([[c.entry_point for c in candidates], [m in sys.modules for m in mine],"
        " [m for m in ('torch', 'pydantic', 'vllm_cpu') if m in sys.modules]]))"
    )
    assert site.child(code, VLLM_PLATFORM=name) == [["wanted"], [True, False, False], []]


def test_a_vendor_is_a_name_where_no_entry_point_has_it(site, source, collecting):
    site.add("dist-a", {"one": source("one", vendor="acme")})
    site.add("dist-b", {"two": source("two", vendor="bolt")})
    assert platforms(collecting("bolt")[0]) == ["dist-b:two"]


def test_a_name_that_nobody_has_leaves_everything_for_the_error_message(site, source, collecting):
    site.add("dist-a", {"one": source("one")})
    assert platforms(collecting("nobody")[0]) == ["dist-a:one"]


def test_the_option_is_stronger_than_the_variable():
    assert requested("a", {"VLLM_PLATFORM": "b"}) == "a"
    assert requested(None, {"VLLM_PLATFORM": "b"}) == "b"
    assert requested(None, {"VLLM_PLATFORM": ""}) is None


def test_narrowing_by_key_separates_two_distributions_of_one_name():
    found = [
        Found(distribution=distribution, version="1", entry_point=name, value="m")
        for distribution, name in (("a", "x"), ("b", "x"), ("k", "x.fast"), ("c", "y"))
    ]
    assert [one.key for one in narrow(found, "a:x")] == ["a:x", "k:x.fast"]
    assert [one.key for one in narrow(found, "x")] == ["a:x", "b:x", "k:x.fast"]
    assert narrow(found, None) == found


def test_kernels_alone_are_added_to_every_platform_of_that_name(site, source, kernels_source, collecting):
    site.add("dist-a", {"one": source("one")})
    site.add("dist-b", {"two": source("two")})
    site.add("dist-k", {"one.fast": kernels_source})
    providers = {one.entry_point: {offer.provider for offer in one.offers} for one in collecting()[0]}
    assert providers == {"one": {"one", "fast", "reference"}, "two": {"two", "reference"}}


def test_a_failing_kernel_package_leaves_its_platform_usable(site, source, kernels_source, collecting):
    site.add("dist-a", {"one": source("one")})
    site.add("dist-k", {"one.fast": kernels_source.replace("rms_norm", "rms_nrm")})
    candidates, failed = collecting()
    assert platforms(candidates) == ["dist-a:one"]
    assert of_site(failed)["dist-k:one.fast"].stage == "offers"


def test_two_architectures_of_one_platform_are_two_candidates(site, source, collecting):
    facts = "name='', device_type='', memory_kind='host', memory_bytes=1"
    devices = ", ".join(f"DeviceFacts(id='{i}', architecture='{a}', {facts})" for i, a in (("a", "x"), ("b", "y"), ("c", "x")))
    probe = f"return ProbeReport(devices=({devices}), checks=())"
    site.add("dist-a", {"one": source("one", probe=probe)})
    assert [[device.id for device in one.devices] for one in collecting()[0]] == [["a", "c"], ["b"]]


def test_a_device_says_that_references_do_not_run_on_it(site, source, collecting):
    probe = (
        "return ProbeReport(devices=(DeviceFacts(id='a', name='', device_type='', architecture='x', memory_kind='discrete',"
        " memory_bytes=1, properties={'eager': 'none'}),), checks=())"
    )
    site.add("dist-a", {"one": source("one", probe=probe)})
    assert [one.eager_full for one in collecting()[0]] == [False]


NO_DEVICE = """missing = Check(name="driver", outcome="failed", detail="libx.so.1 missing", hint="mount it")
    return ProbeReport(devices=(), checks=(missing,))"""


def test_no_device_on_a_machine_without_the_hardware_is_no_failure(site, source, collecting):
    site.add("dist-a", {"rocm": source("rocm", probe=NO_DEVICE)})
    candidates, failed = collecting()
    assert [one.devices for one in candidates] == [()]
    assert of_site(failed) == {}


def test_no_device_although_the_hardware_is_visible_fails_with_the_checks_and_hints(site, source, collecting, empty_root):
    site.add("dist-a", {"rocm": source("rocm", probe=NO_DEVICE)})
    (empty_root / "dev").mkdir()
    (empty_root / "dev/kfd").write_text("")
    candidates, failed = collecting()
    report = of_site(failed)["dist-a:rocm"]
    assert candidates == []
    assert report.stage == "devices"
    assert report.visible_hardware
    assert "/dev/kfd" in report.cause
    assert "libx.so.1 missing" in report.cause
    assert report.fix == "mount it"


def test_hardware_that_the_user_hid_is_not_missed(site, source, collecting, empty_root):
    site.add("dist-a", {"rocm": source("rocm", probe=NO_DEVICE)})
    (empty_root / "dev").mkdir()
    (empty_root / "dev/kfd").write_text("")
    assert of_site(collecting(FAKE_VISIBLE="")[1]) == {}


def test_a_failed_plugin_knows_whether_its_hardware_is_visible(site, collecting, empty_root):
    site.add("dist-a", {"rocm": "raise ImportError('x')", "other": "raise ImportError('y')"})
    (empty_root / "dev").mkdir()
    (empty_root / "dev/kfd").write_text("")
    assert {one.entry_point: one.visible_hardware for one in collecting()[1] if one.stage == "import"} == {
        "rocm": True,
        "other": False,
    }


def test_hardware_without_an_installed_plugin_comes_with_the_install_command(
    collecting, site, source, empty_root, without_ascend
):
    site.add("dist-a", {"one": source("one")})
    (empty_root / "dev").mkdir()
    (empty_root / "dev/davinci0").write_text("")
    (missing,) = [one for one in collecting()[1] if one.stage == "missing"]
    assert missing.distribution == "vllm-ascend"
    assert "./plugins/vllm-ascend (in a checkout)" in missing.fix


def test_references_cover_every_op_but_wholes_once_and_families_whole():
    offers = reference_offers()
    ops = [op for offer in offers for op in offer.ops]
    assert sorted(ops) == sorted(OPS.keys() - WHOLES)
    for offer in offers:
        assert len({OPS[op].family or op for op in offer.ops}) == 1
        assert offer.kind == "reference"
