"""The probe on made-up machines: limits of containers, missing files."""

from __future__ import annotations

import os

import pytest

from vllm_cpu import native, probe

CPUINFO = "processor : 0\nmodel name : Test CPU 9000\nflags : fpu avx2 fma\n\nprocessor : 1\nmodel name : Test CPU 9000\n"


@pytest.fixture
def machine(tmp_path):
    """Write files below a root and return it."""

    def make(**files: str):
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return make


def _write(root, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def _check(report, name):
    return next(check for check in report.checks if check.name == name)


def test_model_features_and_architecture_come_from_cpuinfo(machine) -> None:
    report = probe.probe(machine(proc__cpuinfo=CPUINFO, proc__meminfo="MemTotal: 1024 kB\n"))
    (device,) = report.devices
    assert device.name == "Test CPU 9000"
    assert device.architecture.endswith("-avx2")
    assert device.properties["features"] == "avx2 fma"
    assert device.memory_bytes == 1 << 20
    assert device.memory_kind == "host"


@pytest.mark.parametrize(
    ("path", "text"),
    [("sys/fs/cgroup/memory.max", "262144"), ("sys/fs/cgroup/memory/memory.limit_in_bytes", "262144\n")],
)
def test_memory_is_bounded_by_the_control_group(machine, path, text) -> None:
    root = machine(proc__meminfo="MemTotal: 1024 kB\n")
    _write(root, path, text)
    assert probe.probe(root).devices[0].memory_bytes == 262144


@pytest.mark.parametrize("text", ["max", str(2**63 - 4096)])
def test_a_control_group_without_a_limit_bounds_nothing(machine, text) -> None:
    root = machine(proc__meminfo="MemTotal: 1024 kB\n")
    _write(root, "sys/fs/cgroup/memory.max", text)
    report = probe.probe(root)
    assert report.devices[0].memory_bytes == 1 << 20
    assert _check(report, "memory limit").outcome == "skipped"


def test_file_cache_does_not_count_as_used(machine) -> None:
    root = machine()
    _write(root, "sys/fs/cgroup/memory.current", "1000")
    _write(root, "sys/fs/cgroup/memory.stat", "anon 300\ninactive_file 600\n")
    assert probe.memory_used(root) == 400
    assert probe.memory_used(root / "nowhere") is None


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"sys/fs/cgroup/cpu.max": "150000 100000"}, 1),
        ({"sys/fs/cgroup/cpu.max": "max 100000"}, None),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "100000", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, 1),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, None),
    ],
)
def test_cores_are_bounded_by_the_quota(machine, files, cores) -> None:
    root = machine(proc__meminfo="MemTotal: 1024 kB\n")
    for path, text in files.items():
        _write(root, path, text)
    found = int(probe.probe(root).devices[0].properties["cores"])
    assert found == (cores if cores is not None else len(os.sched_getaffinity(0)))


def test_a_system_without_proc_is_no_crash_and_says_what_was_skipped(tmp_path) -> None:
    report = probe.probe(tmp_path)
    assert _check(report, "processor").outcome == "skipped"
    assert report.devices  # POSIX tells the memory


def test_no_memory_size_at_all_is_a_failed_check_with_a_hint(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(os, "sysconf_names", {})
    report = probe.probe(tmp_path)
    assert report.devices == ()
    assert _check(report, "memory").hint or report.failures[0].hint


def test_small_shared_memory_is_reported_with_the_fix(machine, monkeypatch) -> None:
    root = machine(proc__meminfo="MemTotal: 1024 kB\n")
    (root / "dev/shm").mkdir(parents=True)
    monkeypatch.setattr(probe, "SMALL_SHM_BYTES", 1 << 62)
    assert "--shm-size" in _check(probe.probe(root), "/dev/shm").hint
    assert probe.probe(root).devices


def test_the_native_library_is_reported_with_every_path(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("VLLM_CORE_OPS_PATH", raising=False)
    monkeypatch.setattr(native, "packaged", lambda: tmp_path / "none.so")
    monkeypatch.setattr(native, "load", native.find)  # what a process has found is kept
    assert "no native library in this build" in _check(probe.probe(tmp_path), "native library").detail
    monkeypatch.setenv("VLLM_CORE_OPS_PATH", str(tmp_path / "missing.so"))
    assert _check(probe.probe(tmp_path), "native library").outcome == "failed"
