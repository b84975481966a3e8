from __future__ import annotations

import pytest

from vllm_core.api import DeviceFacts
from vllm_core.errors import PluginError, UnsupportedError
from vllm_core.registry.discover import find
from vllm_core.registry.load import Loaded, attempt, load, open_platform
from vllm_core.registry.plan import Failed

DEVICE = DeviceFacts(id="0", name="n", device_type="fake", architecture="a", memory_kind="host", memory_bytes=1)


@pytest.fixture
def loading(site):
    """Install one plugin and load it."""

    def install(source, name="fake", distribution="dist-a"):
        site.add(distribution, {name: source})
        (one,) = [found for found in find() if found.key == f"{distribution}:{name}"]
        return load(one)

    return install


def test_a_good_plugin_loads_with_its_manifest(loading, source):
    loaded = loading(source("fake"))
    assert isinstance(loaded, Loaded)
    assert loaded.manifest.name == "fake"
    assert loaded.configure({}, frozenset()).changes == {}
    assert loaded.programs(DEVICE) == ()


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("raise OSError('libfake.so.1: cannot open shared object file')", "OSError: libfake.so.1"),
        ("import no_such_module_anywhere", "ModuleNotFoundError"),
        ("import sys; sys.exit(3)", "sys.exit(3)"),
        ("def broken(:", "SyntaxError"),
    ],
)
def test_a_failing_import_is_reported_with_distribution_cause_and_exception(loading, code, cause):
    failed = loading(code)
    assert isinstance(failed, Failed)
    assert (failed.key, failed.stage) == ("dist-a:fake", "import")
    assert cause in failed.cause
    assert failed.error is not None


def test_the_cause_names_the_line_in_the_plugin(loading):
    failed = loading("\n\nraise ValueError('boom')\n")
    assert ".py:3)" in failed.cause


def test_a_wrong_signature_names_plugin_hook_and_argument(loading, source):
    failed = loading(source("fake").replace("def create_device(facts)", "def create_device(facts, colour)"))
    assert failed.stage == "hooks"
    for part in ("dist-a:fake", "create_device", "colour"):
        assert part in failed.cause


def test_a_missing_hook_is_an_error_that_names_it(loading, source):
    failed = loading(source("fake").replace("@hookimpl\ndef start", "def start"))
    assert failed.stage == "hooks"
    assert "'start'" in failed.cause


def test_a_hook_that_does_not_exist_is_an_error_with_the_nearest(loading, source):
    failed = loading(source("fake") + "\n@hookimpl\ndef create_devices(facts):\n    return None\n")
    assert failed.stage == "hooks"
    assert "create_devices" in failed.cause
    assert failed.fix == "did you mean 'create_device'?"


def test_kernels_alone_need_no_manifest(loading, kernels_source):
    loaded = loading(kernels_source, name="fake.fast")
    assert isinstance(loaded, Loaded)
    assert loaded.manifest is None
    assert [offer.provider for offer in loaded.offers(DEVICE)] == ["fast"]


def test_kernels_under_a_platforms_name_are_told_the_naming_rule(loading, kernels_source):
    failed = loading(kernels_source)
    assert failed.stage == "hooks"
    assert "PLATFORM.NAME" in failed.fix


@pytest.mark.parametrize("version", ["1.0", "7.3"])
def test_another_api_major_is_refused(loading, source, version):
    failed = loading(source("fake", api_version=version))
    assert failed.stage == "version"
    assert version in failed.cause
    assert failed.fix == "install a newer vllm-core"


def test_a_later_minor_loads_with_names_unknown_here(loading, source):
    loaded = loading(source("fake", api_version="0.9", setup="CLAIMS['teleport'] = Full()"))
    assert isinstance(loaded, Loaded)
    assert loaded.newer


def test_an_api_version_that_is_none_is_a_manifest_error(loading, source):
    assert loading(source("fake", api_version="latest")).stage == "manifest"


def test_a_core_range_without_this_core_says_what_it_needs(loading, source):
    failed = loading(source("fake", core_range=">=0.5,<0.6"))
    assert failed.stage == "version"
    assert ">=0.5,<0.6" in failed.cause


def test_a_core_range_that_cannot_be_read_is_a_manifest_error(loading, source):
    assert loading(source("fake", core_range="about 1")).stage == "manifest"


def test_a_missing_claim_is_an_error_that_names_it(loading, source):
    failed = loading(source("fake", setup="del CLAIMS['graphs']"))
    assert failed.stage == "claims"
    assert "graphs" in failed.cause


def test_an_unknown_claim_is_an_error_with_the_nearest(loading, source):
    failed = loading(source("fake", setup="CLAIMS['graph'] = Full()"))
    assert failed.stage == "claims"
    assert "'graph'" in failed.cause
    assert failed.fix == "did you mean 'graphs'?"


@pytest.mark.parametrize(
    ("setup", "field"),
    [
        ("CLAIMS['graphs'] = True", "claims['graphs']"),
        ("CLAIMS = ['graphs']", "claims"),
    ],
)
def test_claims_of_a_wrong_type_are_a_manifest_error(loading, source, setup, field):
    failed = loading(source("fake", setup=setup))
    assert failed.stage == "manifest"
    assert field in failed.cause


@pytest.mark.parametrize("change", [{"device_class": "gpu"}, {"support_level": "great"}])
def test_a_value_outside_the_vocabulary_is_a_manifest_error(loading, source, change):
    failed = loading(source("fake", **change))
    assert failed.stage == "manifest"
    assert next(iter(change)) in failed.cause


def test_a_manifest_of_another_type_is_an_error(loading, source):
    text = source("fake").replace("return Manifest(", "return dict(")
    assert "dict" in loading(text).cause


def test_a_manifest_that_raises_keeps_the_exception(loading, source):
    failed = loading(source("fake").replace("return Manifest(", "raise KeyError('x')\n    return Manifest("))
    assert failed.stage == "manifest"
    assert isinstance(failed.error, KeyError)


def test_manifest_and_entry_point_must_have_one_name(loading, source):
    failed = loading(source("other"), name="fake")
    assert failed.stage == "manifest"
    assert "'other'" in failed.cause


@pytest.mark.parametrize(
    ("offers", "cause", "fix"),
    [
        ("Offer(provider='p', ops={'rms_nrm': 'm:f'})", "'rms_nrm'", "did you mean 'rms_norm'?"),
        ("Offer(provider='p', ops={'rms_norm': 'f'})", "entry is 'f'", "'module:callable'"),
        ("Offer(provider='p', ops={'kv_write': 'm:f'})", "without kv_layout", "kv_layout"),
        ("Offer(provider='reference', ops={})", "'reference'", "core's own"),
        ("Offer(provider='p', ops={'rms_norm': 'm:f'}, features=frozenset({'soft_capp'}))", "'soft_capp'", "soft_cap"),
        ("'rms_norm'", "sequence", "sequence"),
    ],
)
def test_an_offer_that_cannot_be_right_is_refused(loading, source, offers, cause, fix):
    loaded = loading(source("fake", offers=offers))
    with pytest.raises(PluginError) as caught:
        loaded.offers(DEVICE)
    assert cause in caught.value.found
    assert fix in caught.value.fix
    assert "dist-a:fake" in caught.value.on


def test_ops_unknown_here_are_no_mistake_of_a_later_minor(loading, source):
    loaded = loading(source("fake", api_version="0.9", offers="Offer(provider='p', ops={'teleport': 'm:f'})"))
    assert [dict(offer.ops) for offer in loaded.offers(DEVICE)] == [{"teleport": "m:f"}]


def test_what_a_hook_raises_becomes_an_error_that_names_plugin_and_hook(loading, source):
    with pytest.raises(PluginError, match="no device in this test") as caught:
        loading(source("fake")).create_device(DEVICE)
    assert "dist-a:fake" in caught.value.on
    assert "create_device" in caught.value.on
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_hook_that_returns_nothing_is_an_error(loading, source):
    text = source("fake").replace('raise RuntimeError("no device in this test")', "return None")
    with pytest.raises(PluginError, match="NoneType"):
        loading(text).create_device(DEVICE)


def test_errors_of_the_contract_pass_through_a_hook(loading, source):
    raising = "raise UnsupportedError('a', on='b', found='c', expected='d', fix='e')"
    text = source("fake", setup="from vllm_core.api import UnsupportedError").replace(
        'raise RuntimeError("no device in this test")', raising
    )
    with pytest.raises(UnsupportedError):
        loading(text).create_device(DEVICE)


def test_attempt_keeps_interrupts():
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        attempt(interrupted)


def test_a_failing_plugin_hides_no_other(site, source):
    site.add("dist-a", {"bad": "raise ImportError('x')"})
    site.add("dist-b", {"good": source("good")})
    outcomes = {one.key: load(one) for one in find() if one.distribution in ("dist-a", "dist-b")}
    assert isinstance(outcomes["dist-a:bad"], Failed)
    assert isinstance(outcomes["dist-b:good"], Loaded)


@pytest.mark.parametrize("first", ["plugin", "core"])
def test_a_plugin_may_be_imported_before_core_or_after(site, source, first):
    (module,) = site.add("dist-a", {"fake": source("fake")})
    lines = [f"import {module}", "import vllm_core.registry.load as loading"]
    code = "\n".join(lines if first == "plugin" else lines[::-1]) + (
        "\nfrom vllm_core.registry.discover import find\nimport json"
        "\nprint(json.dumps([type(loading.load(f)).__name__ for f in find() if f.entry_point == 'fake']))"
    )
    assert site.child(code) == ["Loaded"]


def test_loading_needs_neither_torch_nor_pydantic(site, source):
    site.add("dist-a", {"fake": source("fake")})
    code = (
        "import json, sys\nfrom vllm_core.registry.discover import find\nfrom vllm_core.registry.load import load"
        "\nstates = [type(load(f)).__name__ for f in find() if f.entry_point == 'fake']"
        "\nprint(json.dumps([states, sorted({'torch', 'pydantic', 'transformers'} & set(sys.modules))]))"
    )
    assert site.child(code) == [["Loaded"], []]


def plan_of(candidate, needs, **changes):
    from dataclasses import replace

    from vllm_core.registry.select import plan

    return replace(plan(needs(), [candidate(distribution="dist-a")], []), **changes)


def test_open_platform_loads_the_plugin_of_the_plan(site, source, candidate, needs):
    site.add("dist-a", {"fake": source("fake")})
    opened = open_platform(plan_of(candidate, needs))
    opened.start(DEVICE)
    assert opened.found.key == "dist-a:fake"


@pytest.mark.parametrize(
    ("changes", "what"),
    [({"entry_point": "gone"}, "missing"), ({"distribution_version": "2.0"}, "changed")],
)
def test_open_platform_refuses_another_plugin_than_the_plans(site, source, candidate, needs, changes, what):
    site.add("dist-a", {"fake": source("fake")})
    with pytest.raises(PluginError, match=what):
        open_platform(plan_of(candidate, needs, **changes))


def test_open_platform_reports_a_plugin_that_fails_in_this_process(site, candidate, needs):
    site.add("dist-a", {"fake": "raise OSError('gone')"})
    with pytest.raises(PluginError, match="OSError: gone"):
        open_platform(plan_of(candidate, needs))
