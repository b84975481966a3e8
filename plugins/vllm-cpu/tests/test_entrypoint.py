"""The entry point loads by name, answers every hook, and imports no torch to do so."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from vllm_core.api import CAPABILITIES, OPS, PLATFORM_HOOKS, DeviceFacts, KVGroupSpec, load_entry
from vllm_core.registry.validate import check_manifest
from vllm_cpu import native, platform, plugin
from vllm_cpu.backends import generic

FACTS = DeviceFacts(
    id="0",
    name="CPU",
    device_type="cpu",
    architecture="x86_64",
    memory_kind="host",
    memory_bytes=8 << 30,
    properties={"cores": "1"},
)


def test_entry_point_of_the_group_is_this_plugin() -> None:
    found = [e for e in entry_points(group="vllm.platforms") if e.value == "vllm_cpu.plugin"]
    assert [e.name for e in found] == ["cpu"]
    assert found[0].load() is plugin


def test_plugin_manifest_probe_and_offers_import_no_torch() -> None:
    code = (
        "import sys; from vllm_cpu import plugin; plugin.manifest(); r = plugin.probe(); plugin.offers(r.devices[0]);"
        "plugin.configure({}, frozenset()); assert 'torch' not in sys.modules and 'pydantic' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_hook_is_there_and_every_capability_is_answered() -> None:
    assert all(callable(getattr(plugin, hook)) for hook in PLATFORM_HOOKS)
    manifest = plugin.manifest()
    assert set(manifest.claims) == set(CAPABILITIES)
    assert check_manifest(manifest, "cpu") is None


def test_offers_name_known_ops_and_entries_that_exist() -> None:
    for offer in plugin.offers(FACTS):
        for name, entry in offer.ops.items():
            assert name in OPS
            assert callable(load_entry(entry))


def test_other_devices_get_no_offers() -> None:
    other = DeviceFacts(id="0", name="x", device_type="x", architecture="x", memory_kind="discrete", memory_bytes=1)
    assert plugin.offers(other) == ()


def test_kv_layout_counts_keys_and_values() -> None:
    group = KVGroupSpec(index=0, kind="full", layers=(0,), num_kv_heads=3, head_size=64)
    assert generic.kv_layout(group, "bfloat16", 16).block_bytes == 2 * 16 * 3 * 64 * 2


@pytest.mark.parametrize("option", sorted(platform.SIZES))
def test_a_size_the_user_gave_is_left_alone(option) -> None:
    assert platform.configure({"memory_bytes": 64 << 30}, frozenset({option})).changes == {}


def test_an_unknown_memory_size_changes_nothing() -> None:
    assert platform.configure({"memory_bytes": 0}, frozenset()).changes == {}


@pytest.mark.parametrize(("memory", "size"), [(64 << 30, 4 << 30), (2 << 30, 512 << 20)])
def test_the_kv_cache_takes_a_bounded_share_and_says_so(memory, size) -> None:
    patch = platform.configure({"memory_bytes": memory}, frozenset({"model"}))
    assert patch.changes == {"kv_cache_memory_bytes": size}
    assert set(patch.reasons) == set(patch.changes)


def test_start_refuses_a_native_library_that_cannot_be_used(monkeypatch) -> None:
    monkeypatch.setenv(native.VARIABLE, "/nowhere/lib.so")
    with pytest.raises(plugin.platform.native.UnsupportedError, match=native.VARIABLE):
        plugin.start(FACTS, 1)


@pytest.mark.parametrize(("given", "expected"), [(None, "passive"), ("active", "active")])
def test_waiting_threads_sleep_unless_the_user_says_otherwise(monkeypatch, given, expected) -> None:
    """The variable must be there before torch is: a fresh process shows it."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", given)
    code = (
        "import os, sys; from vllm_cpu import plugin; device = plugin.probe().devices[0]; assert 'torch' not in sys.modules;"
        "plugin.start(device, 1); assert 'torch' in sys.modules; print(os.environ['OMP_WAIT_POLICY'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == [expected]
