"""Hardware that speaks another's dialect: its plugin declares whose ops run on it, and the Plan says whose they are.

field-reports 27: such a device had to pass for the other vendor's, and to copy that vendor's libraries.
"""

from __future__ import annotations

import importlib
import os

import pytest

from vllm_core.errors import PluginError
from vllm_core.registry import snapshot
from vllm_core.registry.candidates import collect
from vllm_core.registry.explain import from_json, to_json, to_text
from vllm_core.registry.load import open_platform
from vllm_core.registry.select import plan

LENDER = """Offer(provider="lender", ops={"rms_norm": "json:loads", "add": "json:dumps"}, priority=10,
    architectures=frozenset({"big1"})), Offer(provider="lender-new", ops={"rms_norm": "json:loads"}, priority=99,
    architectures=frozenset({"big2"}))"""
DEVICE_OF_LENDER = "assert (device.device_type, device.architecture) == ('lender', 'big1')"


@pytest.fixture
def install(site, source, tmp_path):
    """Install a platform `twin` that reuses the ops of a platform `lender`, which must not be probed."""

    def run(reuse="platform='lender', architectures={'fake1': 'big1'}", *, lender=True, offers="", version="1.0"):
        setup = "from vllm_core.api import Reuse"
        twin = source("twin", setup=setup, offers=offers).replace("claims=CLAIMS,", f"claims=CLAIMS, reuses=(Reuse({reuse}),),")
        site.add("dist-twin", {"twin": twin})
        if lender:
            probe = f"open({str(tmp_path / 'probed')!r}, 'w'); raise RuntimeError('not our device')"
            site.add("dist-lender", {"lender": source("lender", offers=LENDER, probe=probe)}, version)

    return run


@pytest.fixture
def collecting(site, empty_root):
    def run(only="twin", plugins="dist-twin,dist-lender,dist-k", **environ):
        installed = {folder.name.partition("-1.")[0].replace("_", "-") for folder in site.folder.glob("dist_*.dist-info")}
        allowed = ",".join(name for name in plugins.split(",") if name in installed)
        return collect(only=only, environ={**site.environ, "VLLM_CORE_PLUGINS": allowed, **environ}, root=empty_root)

    return run


def of_site(failed):
    return [one for one in failed if one.key.startswith("dist-")]


def test_reused_ops_are_chosen_and_the_plan_says_whose_they_are(install, collecting, needs, tmp_path):
    install()
    chosen = plan(needs(), *collecting())
    assert chosen.platform == "twin"
    assert chosen.binding("rms_norm", "norm").provider == "lender"
    assert chosen.owners == {"lender": "dist-lender 1.0"}
    assert "lender 1 (kernel, of dist-lender 1.0)" in to_text(chosen)
    assert from_json(to_json(chosen)) == chosen
    assert not (tmp_path / "probed").exists(), "the other platform's hardware is none of ours"


def test_own_ops_go_before_reused_ones_whatever_their_priority(install, collecting, needs):
    install(offers='Offer(provider="twin", ops={"rms_norm": "json:loads"}, priority=-5)')
    binding = plan(needs(), *collecting()).binding("rms_norm", "norm")
    assert binding.provider == "twin"
    assert [provider for provider, _, _ in binding.fallbacks] == ["lender", "reference"]


def test_the_lender_is_asked_about_its_own_kind_of_device(site, source, install, collecting):
    install(lender=False)
    text = source("lender", offers=LENDER).replace("return [Offer", f"{DEVICE_OF_LENDER}\n    return [Offer")
    assert DEVICE_OF_LENDER in text
    site.add("dist-lender", {"lender": text})
    candidates, failed = collecting()
    assert of_site(failed) == []
    assert "lender" in {offer.provider for offer in candidates[0].offers}


def test_kernels_for_an_architecture_that_it_does_not_pose_as_are_left_out(install, collecting):
    install()
    (twin,), _ = collecting()
    assert {offer.provider for offer in twin.offers} == {"lender", "reference"}
    (taken,) = [offer for offer in twin.offers if offer.provider == "lender"]
    assert taken.architectures == frozenset({"fake1"})


def test_a_device_that_no_architecture_is_named_for_gets_nothing(install, collecting):
    install("platform='lender', architectures={'fake9': 'big1'}")
    (twin,), failed = collecting()
    assert {offer.provider for offer in twin.offers} == {"reference"}
    assert of_site(failed) == []


def test_reuse_may_be_limited_to_some_ops(install, collecting):
    install("platform='lender', architectures={'fake1': 'big1'}, ops=frozenset({'add'})")
    (twin,), _ = collecting()
    assert [set(offer.ops) for offer in twin.offers if offer.provider == "lender"] == [{"add"}]


def test_kernel_packages_of_the_lender_come_with_it(site, kernels_source, install, collecting):
    install()
    site.add("dist-k", {"lender.fast": kernels_source})
    (twin,), _ = collecting()
    assert twin.owners == {"lender": "dist-lender 1.0", "fast": "dist-k 1.0"}


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"lender": False}, "'lender', which is not installed"),
        ({"reuse": "platform='lender', versions='>=2', architectures={'fake1': 'big1'}"}, "tried with >=2"),
    ],
)
def test_what_cannot_be_reused_is_reported_and_the_platform_works_without(install, collecting, needs, options, cause):
    install(**options)
    candidates, failed = collecting()
    (one,) = of_site(failed)
    assert (one.key, one.stage) == ("dist-twin:twin", "reuse")
    assert cause in one.cause
    chosen = plan(needs(), candidates, failed)
    assert chosen.binding("rms_norm", "norm").provider == "reference"
    assert any(cause in note for note in chosen.notes)


def test_a_lender_outside_of_the_allow_list_is_not_imported(install, collecting):
    install()
    _, failed = collecting(plugins="dist-twin")
    assert [one.stage for one in of_site(failed)] == ["reuse"]


def test_a_lender_that_crashes_at_import_is_one_failure(site, install, collecting):
    install(lender=False)
    site.add("dist-lender", {"lender": "import ctypes\nctypes.string_at(0)\n"})
    candidates, failed = collecting()
    assert {(one.key, one.stage) for one in of_site(failed)} == {("dist-lender:lender", "import"), ("dist-twin:twin", "reuse")}
    assert [one.entry_point for one in candidates] == ["twin"]


def test_a_lender_that_is_a_candidate_too_is_imported_once(install, collecting):
    install()
    candidates, failed = collecting(only=None)
    assert [one.entry_point for one in candidates] == ["twin"]
    assert {one.key for one in of_site(failed)} == {"dist-lender:lender"}, "its probe failed: its device is not here"
    assert "lender" in candidates[0].owners


def test_an_engine_process_refuses_ops_of_another_version(site, install, collecting, needs):
    install()
    chosen = plan(needs(), *collecting())
    assert open_platform(chosen).found.entry_point == "twin"
    os.rename(site.folder / "dist_lender-1.0.dist-info", site.folder / "dist_lender-1.1.dist-info")
    metadata = site.folder / "dist_lender-1.1.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("Version: 1.0", "Version: 1.1"))
    importlib.invalidate_caches()
    with pytest.raises(PluginError, match=r"dist-lender 1\.0"):
        open_platform(chosen)


@pytest.mark.parametrize(
    ("reuse", "part"),
    [
        ("platform='twin', architectures={}", "reuses itself"),
        ("platform='lender', architectures={}, versions='newest'", "newest"),
        ("platform=3, architectures={}", "reuses"),
    ],
)
def test_a_declaration_that_cannot_be_right_is_a_manifest_error(install, collecting, reuse, part):
    install(reuse)
    (one,) = [one for one in of_site(collecting()[1]) if one.key == "dist-twin:twin"]
    assert one.stage == "manifest"
    assert part in one.cause


def test_two_distributions_cannot_share_a_providers_name(site, source, collecting):
    site.add("dist-twin", {"twin": source("twin")})
    site.add(
        "dist-k",
        {
            "twin.more": "from vllm_core.api import Offer, hookimpl\n@hookimpl\ndef offers(device):\n"
            "    return [Offer(provider='twin', ops={'add': 'json:loads'})]\n"
        },
    )
    candidates, failed = collecting()
    assert [one.key for one in of_site(failed)] == ["dist-k:twin.more"]
    assert candidates[0].owners == {}


def test_a_saved_machine_is_planned_for_with_the_lenders_of_here(install, collecting, tmp_path):
    install()
    (twin,), _ = collecting()
    saved = snapshot.Snapshot(
        format=snapshot.FORMAT, core_version="0", host={}, platforms=(snapshot.save_platform(twin),), failed=(), steps={}
    )
    file = tmp_path / "machine.json"
    file.write_bytes(snapshot.encode(saved))
    (again,), _ = snapshot.recompute(snapshot.read(file), file)
    assert again.owners == twin.owners
    assert again.manifest == twin.manifest
