from __future__ import annotations

from dataclasses import replace

import pytest

from vllm_cuda import probe
from vllm_cuda.driver import Driver, DriverError, id_of

CUDA_13 = ("2.11.0+cu130", "13.0")


def look(tmp_path, driver, *, nvml=lambda: "580.159.04", build=CUDA_13, mig=tuple):
    return probe.probe(tmp_path, driver, nvml, lambda: build, mig)


def outcomes(report) -> dict[str, str]:
    return {check.name: check.outcome for check in report.checks}


def test_a_gpu_is_reported_with_its_uuid_architecture_and_memory(tmp_path, make_driver, make_gpu):
    report = look(tmp_path, lambda: make_driver((13, 0), (make_gpu(),)))
    (device,) = report.devices
    assert device.id == "GPU-394d5c4c-e2e3-22c8-1858-a900fe08625e"
    assert (device.architecture, device.memory_kind, device.memory_bytes) == ("sm_90", "discrete", 150109880320)
    assert device.driver_version == "580.159.04"
    assert report.failures == ()


def test_an_instance_of_mig_is_reported_with_its_own_size_and_the_id_that_makes_it_visible(tmp_path, make_driver, make_gpu):
    raw, name = bytes(range(16)), "NVIDIA A100-SXM4-40GB MIG 3g.20gb"
    part = replace(make_gpu((8, 0), name), id=id_of(raw, name), memory_bytes=20 << 30, multiprocessors=42)
    report = look(tmp_path, lambda: make_driver((13, 0), (part,)))
    (device,) = report.devices
    assert device.id == "MIG-00010203-0405-0607-0809-0a0b0c0d0e0f"
    (check,) = [check for check in report.checks if check.name == "MIG of device 0"]
    assert (check.outcome, check.detail) == ("ok", f"{device.id}, an instance 3g.20gb: 42 multiprocessors, 20480 MiB")


def test_a_whole_gpu_is_no_instance(tmp_path, make_driver, make_gpu):
    assert id_of(bytes(16), "NVIDIA H200").startswith("GPU-")
    report = look(tmp_path, lambda: make_driver((13, 0), (make_gpu(),)))
    assert not [check for check in report.checks if check.name.startswith("MIG")]


def test_memory_that_host_and_gpu_share_is_told(tmp_path, make_driver, make_gpu):
    shared = replace(make_gpu((12, 1), "NVIDIA GB10"), integrated=True)
    (device,) = look(tmp_path, lambda: make_driver((13, 0), (shared,))).devices
    assert device.memory_kind == "unified"


def test_a_missing_driver_is_a_failure_with_a_hint_and_no_device(tmp_path):
    def missing():
        raise OSError("libcuda.so.1: cannot open shared object file")

    report = look(tmp_path, missing)
    assert report.devices == ()
    failed = {check.name: check for check in report.failures}
    assert "libcuda.so.1" in failed["driver"].detail
    assert failed["driver"].hint


def test_a_driver_that_does_not_start_is_told_apart_from_a_missing_one(tmp_path):
    def broken():
        raise DriverError("cuInit: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803)")

    report = look(tmp_path, broken)
    assert report.devices == ()
    assert "803" in next(check.detail for check in report.failures if check.name == "driver")


def test_nvml_out_of_reach_does_not_cost_the_device(tmp_path, make_driver, make_gpu):
    def unreachable():
        raise OSError("libnvidia-ml.so.1")

    report = look(tmp_path, lambda: make_driver((13, 0), (make_gpu(),)), nvml=unreachable)
    assert len(report.devices) == 1
    assert outcomes(report)["NVML"] == "skipped"


def test_a_torch_without_cuda_brings_no_device_and_says_what_to_install(tmp_path, make_driver, make_gpu):
    report = look(tmp_path, lambda: make_driver((13, 0), (make_gpu(),)), build=("2.13.0+cpu", None))
    assert report.devices == ()
    assert "built without CUDA" in next(check.detail for check in report.failures if check.name == "torch")


def test_a_driver_older_than_the_runtime_is_refused_with_both_versions(tmp_path, make_driver, make_gpu):
    report = look(tmp_path, lambda: make_driver((12, 4), (make_gpu(),)))
    assert report.devices == ()
    detail = next(check.detail for check in report.failures if check.name == "torch")
    assert "CUDA 13" in detail
    assert "12.4" in detail


def test_a_chip_without_kernels_is_named_with_those_that_have_them(tmp_path, make_driver, make_gpu):
    report = look(tmp_path, lambda: make_driver((13, 0), (make_gpu((7, 5), "Tesla T4"),)))
    detail = next(check.detail for check in report.failures if check.name == "kernels for device 0")
    assert "sm_75" in detail
    assert "sm_90" in detail


@pytest.mark.parametrize(
    ("capability", "built", "found"),
    [
        ((12, 0), "12.6", 0),
        ((10, 0), "12.6", 0),
        ((12, 1), "12.8", 1),
        ((10, 3), "13.0", 1),
        ((9, 0), "12.6", 1),
        ((8, 9), "12.6", 1),
    ],
)
def test_a_torch_built_before_there_was_such_a_chip_is_told_at_once(tmp_path, make_driver, make_gpu, capability, built, found):
    """vllm#20748: "no kernel image is available" at the first tensor op."""
    driver = make_driver((13, 0), (make_gpu(capability),))
    report = look(tmp_path, lambda: driver, build=("2.10.0", built))
    assert len(report.devices) == found
    (check,) = [check for check in report.checks if check.name == "kernels for device 0"]
    assert check.outcome == ("ok" if found else "failed")
    if not found:
        assert f"sm_{capability[0]}{capability[1]}, known since CUDA 12.8; torch is built for 12.6" in check.detail


@pytest.mark.parametrize(
    ("capability", "supports", "build", "missing"),
    [
        ((8, 0), (13, 0), CUDA_13, "hardware"),
        ((9, 0), (11, 7), ("2.0", "11.8"), "driver"),
        ((9, 0), (11, 8), ("2.0", "11.7"), "toolkit"),
    ],
)
def test_the_three_conditions_of_fp8_are_told_apart(tmp_path, make_driver, make_gpu, capability, supports, build, missing):
    report = look(tmp_path, lambda: make_driver(supports, (make_gpu(capability),)), build=build)
    (check,) = [check for check in report.checks if check.name == "fp8 on device 0"]
    assert check.outcome == "skipped"
    assert check.detail.startswith(missing)
    assert ";" not in check.detail


def test_a_library_that_is_not_the_driver_is_refused_by_the_missing_call():
    with pytest.raises(DriverError, match="cuInit"):
        Driver("libc.so.6")


def test_the_installed_torch_is_read_without_importing_it():
    found = probe.installed_torch()
    assert found is not None
    import torch

    assert found == (torch.__version__, torch.version.cuda)
