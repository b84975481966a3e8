from __future__ import annotations

import os

import pytest

from vllm_core.api.manifest import Check, Companion
from vllm_core.registry.doctor import (
    check_devices,
    check_files,
    check_libraries,
    check_plugins,
    check_shared_memory,
    check_torch,
    examine,
)
from vllm_core.registry.hardware import scan
from vllm_core.registry.plan import Failed
from vllm_core.registry.snapshot import encode, read


def outcomes(checks):
    return {check.name: check.outcome for check in checks}


def test_all_steps_are_walked_and_saved(site, source, empty_root, tmp_path, stub_torch):
    site.add("dist-a", {"fake": source("fake")})
    site.add("dist-b", {"bad": "raise ImportError('stale')"})
    environ = {**site.environ, "VLLM_CORE_PLUGINS": "dist-a,dist-b"}
    snapshot = examine(environ, root=empty_root)
    assert list(snapshot.steps) == [
        "torch build",
        "driver and devices",
        "device files and container",
        "plugin, probe and backend",
        "native libraries",
        "shared memory",
    ]
    assert outcomes(snapshot.steps["plugin, probe and backend"])["dist-b:bad"] == "failed"
    (tmp_path / "s.json").write_bytes(encode(snapshot))
    assert read(tmp_path / "s.json") == snapshot


def test_the_torch_build_is_named(stub_torch):
    (check,) = check_torch(os.environ)
    assert (check.outcome, check.detail) == ("ok", "version 9.9, build special")


def test_torch_is_looked_at_in_a_child_process(site):
    code = (
        "import json, os, sys\nfrom vllm_core.registry.doctor import check_torch\n(check,) = check_torch(os.environ)\n"
        "print(json.dumps([check.outcome, 'version' in check.detail, 'torch' in sys.modules]))"
    )
    assert site.child(code) == ["ok", True, False]


def test_a_torch_that_does_not_import_is_a_failed_check_with_the_last_line(site):
    (site.folder / "torch.py").write_text("raise OSError('libtorch.so: undefined symbol')")
    (check,) = check_torch(os.environ)
    assert check.outcome == "failed"
    assert "undefined symbol" in check.detail
    assert check.hint


def test_devices_and_the_probes_checks_are_listed_by_platform(candidate):
    checks = check_devices([candidate(), candidate("zero", devices=())])
    assert outcomes(checks) == {"fake: driver": "ok", "fake: device dev-0": "ok", "zero: driver": "failed"}


def test_no_device_at_all_is_a_failed_check(candidate):
    assert outcomes(check_devices([candidate(devices=())]))["devices"] == "failed"


def test_plugins_are_listed_with_what_they_offer(candidate, offer):
    failed = Failed(distribution="d", entry_point="e", stage="hooks", cause="c", fix="do this")
    checks = check_plugins([candidate(offers=(offer("fast"),))], [failed])
    assert outcomes(checks) == {"vllm-fake:fake": "ok", "d:e": "failed"}
    assert "1 ops by fast" in checks[0].detail
    assert checks[1].hint == "do this"


def test_a_plugin_is_listed_with_the_versions_that_it_was_made_for(candidate):
    made_for = (Companion(name="torch", versions=">=2.10"), Companion(name="HIP", versions=">=7.0", architectures=("gfx950",)))
    (check,) = check_plugins([candidate(companions=made_for)], [])
    assert check.detail.endswith("made for torch >=2.10, HIP >=7.0 for gfx950")


def test_no_plugin_at_all_is_a_failed_check():
    (check,) = check_plugins([], [])
    assert check.outcome == "failed"
    assert "vllm.platforms" in check.detail


@pytest.fixture
def device_root(empty_root):
    (empty_root / "dev").mkdir()
    (empty_root / "dev/kfd").write_text("")
    return empty_root


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may open every file")
def test_a_device_file_that_may_not_be_opened_names_the_group_to_join(device_root):
    (device_root / "dev/kfd").chmod(0)
    checks = {check.name: check for check in check_files(scan(device_root), device_root, {})}
    assert checks["/dev/kfd"].outcome == "failed"
    assert "group" in checks["/dev/kfd"].hint


def test_a_device_file_that_may_be_opened_is_fine(device_root):
    assert outcomes(check_files(scan(device_root), device_root, {}))["/dev/kfd"] == "ok"


def test_hardware_without_a_device_file_in_a_container_points_at_its_start(empty_root):
    folder = empty_root / "sys/bus/pci/devices/0000:01:00.0"
    folder.mkdir(parents=True)
    (folder / "vendor").write_text("0x1002")
    (folder / "class").write_text("0x030000")
    (empty_root / ".dockerenv").write_text("")
    checks = {check.name: check for check in check_files(scan(empty_root), empty_root, {})}
    assert "/.dockerenv" in checks["container"].detail
    assert checks["AMD GPU"].outcome == "failed"
    assert "--device" in checks["AMD GPU"].hint


def test_a_machine_without_hardware_skips_the_step(empty_root):
    assert outcomes(check_files((), empty_root, {"KUBERNETES_SERVICE_HOST": "x"})) == {"container": "ok", "hardware": "skipped"}


def test_shared_memory_is_judged_by_what_is_free(empty_root, monkeypatch):
    assert check_shared_memory(empty_root)[0].outcome == "skipped"
    (empty_root / "dev/shm").mkdir(parents=True)
    free = os.statvfs(empty_root).f_bavail * os.statvfs(empty_root).f_frsize
    monkeypatch.setattr("vllm_core.registry.doctor.SMALL_SHARED_MEMORY_BYTES", free // 2)
    assert check_shared_memory(empty_root)[0].outcome == "ok"
    monkeypatch.setattr("vllm_core.registry.doctor.SMALL_SHARED_MEMORY_BYTES", free * 2 + (1 << 30))
    assert "--shm-size" in check_shared_memory(empty_root)[0].hint


def test_the_users_own_op_library_is_checked_first(tmp_path):
    (check,) = check_libraries([], {**os.environ, "VLLM_CORE_OPS_PATH": str(tmp_path / "none.so")})
    assert isinstance(check, Check)
    assert (check.name, check.outcome, check.detail) == (str(tmp_path / "none.so"), "failed", "no such file")
