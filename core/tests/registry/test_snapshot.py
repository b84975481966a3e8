from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from vllm_core.api import Companion, Full, NotImplementedYet, Partial, Unsupported, Versioned
from vllm_core.api.manifest import Check
from vllm_core.errors import ConfigError, PluginError
from vllm_core.registry.plan import Failed
from vllm_core.registry.select import plan
from vllm_core.registry.snapshot import (
    FORMAT,
    Snapshot,
    encode,
    manifest_data,
    manifest_from_data,
    read,
    recompute,
    redacted,
    save_failure,
    save_platform,
)

FAILED = Failed(distribution="d", entry_point="e", stage="probe", cause="c", fix="f", visible_hardware=True)
PATH = Path("probe.json")


def snapshot(*candidates, failed=(), **changes):
    values = {
        "format": FORMAT,
        "core_version": "0",
        "host": {"node": "node-17"},
        "platforms": tuple(save_platform(one) for one in candidates),
        "failed": tuple(save_failure(one) for one in failed),
        "steps": {"step": (Check(name="n", outcome="ok", detail=f"on node-17 in {Path.home()}/x"),)},
    }
    return Snapshot(**{**values, **changes})


def test_a_manifest_survives_with_every_kind_of_claim(candidate):
    claims = {
        "graphs": Versioned("driver>=1"),
        "sleep": Partial("why", ("a", "b")),
        "peer_copy": NotImplementedYet("issue"),
        "attention.sinks": Unsupported("no"),
        "prefix_caching": Full(),
    }
    companions = (Companion(name="c", versions=">=1,<2", architectures=("x",), optional=True, distribution="d"),)
    manifest = candidate(claims=claims, architectures=("x",), visible_devices_env="V", companions=companions).manifest
    assert manifest_from_data(manifest_data(manifest)) == manifest


def test_a_snapshot_is_written_and_read_back(candidate, tmp_path):
    made = snapshot(candidate(), failed=[FAILED])
    (tmp_path / "s.json").write_bytes(encode(made))
    assert read(tmp_path / "s.json") == made


def test_redaction_removes_host_home_and_uuids(candidate):
    devices = (replace(candidate().devices[0], id="GPU-8f7e1c3a-1b2c-4d5e-8f90-0123456789ab"),)
    whole = snapshot(candidate(devices=devices))
    text = encode(whole, redact=True).decode()
    assert encode(redacted(whole)).decode() == text, "what is printed is what is saved"
    for secret in ("node-17", str(Path.home()), "8f7e1c3a"):
        assert secret not in text
    assert "GPU-<uuid>" in text


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b"\xff\xfe", b'{"format": "x"}'])
def test_a_file_that_is_no_snapshot_is_refused(tmp_path, data):
    (tmp_path / "s.json").write_bytes(data)
    with pytest.raises(ConfigError, match="doctor --json FILE"):
        read(tmp_path / "s.json")


def test_a_missing_file_and_another_format_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read(tmp_path / "none.json")
    (tmp_path / "s.json").write_bytes(encode(snapshot(format=99)))
    with pytest.raises(ConfigError, match="format 99"):
        read(tmp_path / "s.json")


def test_offers_are_computed_again_from_the_plugin_that_is_installed_here(site, source, candidate, needs):
    site.add("dist-a", {"fake": source("fake")})
    candidates, failed = recompute(snapshot(candidate(distribution="dist-a")), PATH)
    chosen = plan(needs(), candidates, failed)
    assert chosen.binding("rms_norm", "norm").provider == "fake"
    assert chosen.device == candidate().devices[0]


def test_the_saved_machines_claims_count_not_those_of_here(site, source, candidate):
    site.add("dist-a", {"fake": source("fake")})
    saved = candidate(distribution="dist-a", claims={"graphs": Unsupported("old driver")})
    (made,), _ = recompute(snapshot(saved), PATH)
    assert made.manifest.claims["graphs"] == Unsupported("old driver")


def test_another_version_of_the_plugin_is_named(site, source, candidate):
    site.add("dist-a", {"fake": source("fake")}, version="2.0")
    (made,), _ = recompute(snapshot(candidate(distribution="dist-a")), PATH)
    assert [check.detail for check in made.checks if check.outcome == "failed"] == [
        "saved 1.0, here 2.0, whose offers are used"
    ]


def test_a_saved_platform_without_its_plugin_here_is_a_clear_error(candidate, needs):
    host = candidate("host", device_class="host")
    _, failed = recompute(snapshot(candidate(distribution="dist-gone")), PATH)
    with pytest.raises(PluginError, match="which is not installed here"):
        plan(needs(platform="fake"), [host], failed)
    with pytest.raises(PluginError, match="install dist-gone"):
        plan(needs(), [host], failed)


def test_saved_failures_come_back(candidate):
    _, failed = recompute(snapshot(failed=[FAILED]), PATH)
    assert failed == [FAILED]


@pytest.mark.parametrize(
    "manifest", [{}, {"claims": {"graphs": {"kind": "maybe"}}}, {"claims": {"graphs": {"kind": "versioned"}}}, {"claims": 3}]
)
def test_a_saved_manifest_that_was_damaged_is_refused(site, source, candidate, manifest):
    site.add("dist-a", {"fake": source("fake")})
    saved = replace(save_platform(candidate(distribution="dist-a")), manifest=manifest)
    with pytest.raises(ConfigError, match="manifest of dist-a"):
        recompute(snapshot(platforms=(saved,)), PATH)
