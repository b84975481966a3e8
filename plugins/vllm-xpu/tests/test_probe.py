from __future__ import annotations

import pytest

from vllm_xpu.backends.families import architecture_of
from vllm_xpu.driver import Driver, DriverError


def outcomes(report) -> dict[str, str]:
    return {check.name: check.outcome for check in report.checks}


def detail(report, name: str) -> str:
    return next(check.detail for check in report.checks if check.name == name)


def hint(report, name: str) -> str:
    return next(check.hint for check in report.checks if check.name == name)


@pytest.mark.parametrize(
    ("product", "architecture", "subslices", "slm_kib"),
    [("max1550", "pvc", 64, 128), ("a770", "dg2", 32, 64), ("b580", "bmg", 20, 128)],
)
def test_one_gpu_is_reported_with_what_its_family_needs(look, product, architecture, subslices, slm_kib):
    report = look(product)
    (device,) = report.devices
    assert (device.architecture, device.memory_kind) == (architecture, "discrete")
    assert device.properties["multiprocessors"] == str(subslices)
    assert device.properties["slm_bytes"] == str(slm_kib << 10)
    assert report.failures == ()


def test_eight_gpus_have_eight_ids(look):
    report = look(*["max1550"] * 8)
    assert len({device.id for device in report.devices}) == 8
    assert [device.properties["index"] for device in report.devices] == [str(index) for index in range(8)]
    assert report.failures == ()


@pytest.mark.parametrize("product", ["lunar", "uhd770"])
def test_integrated_graphics_are_told_apart_and_not_used_unasked(look, product):
    report = look(product)
    assert report.devices == ()
    assert "integrated" in detail(report, "PCI")
    assert outcomes(report)["device 0"] == "skipped"
    assert "ONEAPI_DEVICE_SELECTOR=level_zero:0" in hint(report, "device 0")


def test_integrated_graphics_beside_a_card_leave_the_card_alone_in_use(look):
    report = look("a770", "uhd770")
    assert [device.architecture for device in report.devices] == ["dg2"]
    assert "UHD Graphics 770" in detail(report, "device 1")


@pytest.mark.parametrize("variable", ["ONEAPI_DEVICE_SELECTOR", "ZE_AFFINITY_MASK"])
def test_integrated_graphics_are_used_where_the_user_chose_them(look, variable):
    (device,) = look("lunar", environ={variable: "level_zero:0"}).devices
    assert (device.architecture, device.memory_kind) == ("lnl", "unified")


def test_integrated_is_what_level_zero_says_before_what_torch_says(look, make_torch):
    from dataclasses import replace

    build = make_torch("lunar")
    wrong = replace(build, devices=(replace(build.devices[0], integrated=False),))
    assert look("lunar", torch_build=lambda: wrong).devices == ()


def test_a_machine_without_a_gpu_says_what_is_missing(look, make_torch):
    def missing():
        raise OSError("libze_loader.so.1: cannot open shared object file")

    report = look(sysfs=False, zero=missing, torch_build=lambda: make_torch(xpu=None, version="2.13.0+cpu"))
    assert report.devices == ()
    assert {check.name for check in report.failures} == {"PCI", "Level Zero", "torch"}
    assert all(check.hint for check in report.failures)


def test_a_card_without_a_driver_is_named(look, make_torch):
    report = look("b580", loaded=False, torch_build=lambda: make_torch(error="No XPU devices are available."))
    assert "0000:04:00.0" in detail(report, "kernel driver")
    assert "dmesg" in hint(report, "kernel driver")
    assert report.devices == ()


def test_a_container_without_device_files_is_told_how_to_get_them(look, make_torch):
    def refused():
        raise DriverError("zeInit: status 0x78000001")

    report = look("b580", files=False, zero=refused, torch_build=lambda: make_torch(error="No XPU devices are available."))
    assert report.devices == ()
    assert "--device=/dev/dri" in hint(report, "device files")
    assert "0x78000001" in detail(report, "Level Zero")


def test_a_runtime_without_sysfs_is_enough(look, make_torch):
    report = look("max1550", sysfs=False)
    assert len(report.devices) == 1
    assert outcomes(report)["PCI"] == "skipped"
    assert report.failures == ()


def test_a_torch_without_xpu_brings_no_device_and_says_what_to_install(look, make_torch):
    report = look("b580", torch_build=lambda: make_torch(xpu=None, version="2.13.0+cpu"))
    assert report.devices == ()
    assert "built without XPU" in detail(report, "torch")


def test_an_old_torch_is_refused_with_both_numbers(look, make_torch):
    report = look("b580", torch_build=lambda: make_torch("b580", version="2.8.0+xpu"))
    assert report.devices == ()
    assert "2.8.0" in detail(report, "torch")
    assert "2.10" in detail(report, "torch")


def test_a_chip_without_kernels_is_named_with_those_that_have_them(look):
    report = look("uhd770", environ={"ZE_AFFINITY_MASK": "0"})
    assert "0x4680" in detail(report, "kernels for device 0")
    assert "pvc" in detail(report, "kernels for device 0")


@pytest.mark.parametrize(("version", "outcome"), [("0.1.16.2", "ok"), ("0.1.9", "failed"), ("0.2.0", "failed")])
def test_xpu_kernels_count_in_the_versions_whose_schemas_are_known(look, version, outcome):
    report = look("b580", kernels=lambda: version)
    assert outcomes(report)["vllm-xpu-kernels"] == outcome
    assert report.devices[0].properties.get("xpu_kernels") == (version if outcome == "ok" else None)
    if outcome == "failed":
        assert version in detail(report, "vllm-xpu-kernels")
        assert ">=0.1.16,<0.2" in detail(report, "vllm-xpu-kernels")


@pytest.mark.parametrize(
    ("device_id", "name"), [(0x0BD5, "pvc"), (0x56A5, "dg2"), (0xE20B, "bmg"), (0x64A0, "lnl"), (0x9A49, "0x9a49")]
)
def test_a_device_id_is_an_architecture(device_id, name):
    assert architecture_of(device_id) == name


def test_a_library_that_is_not_the_loader_is_refused_by_the_missing_call():
    with pytest.raises(DriverError, match="zeInit"):
        Driver("libc.so.6")
