from __future__ import annotations

import pytest

from vllm_rocm import topology
from vllm_rocm.driver import Driver, DriverError, smi_sockets


def outcomes(report) -> dict[str, str]:
    return {check.name: check.outcome for check in report.checks}


def detail(report, name: str) -> str:
    return next(check.detail for check in report.checks if check.name == name)


def hint(report, name: str) -> str:
    return next(check.hint for check in report.checks if check.name == name)


@pytest.mark.parametrize(
    ("product", "architecture", "units", "wave", "lds_kib", "fp8"),
    [
        ("mi250x", "gfx90a", 110, 64, 64, "none"),
        ("mi300x", "gfx942", 304, 64, 64, "fnuz"),
        ("mi350x", "gfx950", 256, 64, 160, "ocp"),
        ("rx7900", "gfx1100", 48, 32, 64, "none"),
        ("rx9070", "gfx1201", 32, 32, 64, "ocp"),
    ],
)
def test_one_gpu_is_reported_with_what_its_family_needs(look, products, product, architecture, units, wave, lds_kib, fp8):
    report = look(product)
    (device,) = report.devices
    assert (device.architecture, device.memory_bytes) == (architecture, products[product].memory_bytes)
    assert device.properties["multiprocessors"] == str(units)
    assert device.properties["wave_size"] == str(wave)
    assert device.properties["lds_bytes"] == str(lds_kib << 10)
    assert device.properties["fp8"] == fp8
    assert (device.driver_version, device.runtime_version) == ("6.12.12", "7.0")
    assert report.failures == ()


def test_an_id_is_the_chips_own_number(look):
    (device,) = look("mi300x").devices
    assert device.id == "GPU-1f2a3b4c5d6e7f80"


def test_eight_gpus_have_eight_ids_and_know_their_links(look):
    report = look(*["mi300x"] * 8, linked=True)
    assert len({device.id for device in report.devices}) == 8
    assert [device.properties["index"] for device in report.devices] == [str(index) for index in range(8)]
    for device in report.devices:
        assert device.links == {other.id: "XGMI" for other in report.devices if other is not device}


def test_partitions_of_one_chip_are_told_apart(look):
    report = look(*["cpx"] * 8)
    assert len({device.id for device in report.devices}) == 8
    assert {device.properties["compute_partition"] for device in report.devices} == {"CPX"}
    assert "compute CPX, memory NPS1" in detail(report, "partition of node 1")


def test_a_machine_without_a_gpu_says_that_the_driver_is_not_loaded(look, make_torch):
    def missing():
        raise OSError("libamdhip64.so: cannot open shared object file")

    report = look(sysfs=False, hip=missing, torch_build=lambda: make_torch(hip=None, version="2.13.0+cpu"))
    assert report.devices == ()
    assert outcomes(report) | {"kernel driver": "failed", "HIP runtime": "failed", "torch": "failed"} == outcomes(report)
    assert all(check.hint for check in report.failures)


def test_a_driver_that_failed_to_start_is_told_from_a_missing_one(look, make_torch, tmp_path):
    (tmp_path / "sys/module/amdgpu").mkdir(parents=True)
    report = look(sysfs=False, torch_build=lambda: make_torch(error="No HIP GPUs are available"))
    assert "no GPU in the KFD topology" in detail(report, "kernel driver")
    assert "dmesg" in hint(report, "kernel driver")
    assert "No HIP GPUs are available" in detail(report, "torch")
    assert report.devices == ()


def test_a_container_without_device_files_is_told_how_to_get_them(look, make_torch):
    def refused():
        raise DriverError("hipInit: hipErrorNoDevice (100)")

    report = look("mi300x", files=False, hip=refused, torch_build=lambda: make_torch(error="No HIP GPUs are available"))
    assert report.devices == ()
    assert "/dev/kfd" in detail(report, "device files")
    assert "--device=/dev/kfd" in hint(report, "device files")
    assert "hipErrorNoDevice (100)" in detail(report, "HIP runtime")


def test_a_runtime_without_sysfs_is_enough(look, make_torch):
    report = look("mi300x", sysfs=False, torch_build=lambda: make_torch("mi300x"))
    (device,) = report.devices
    assert (device.id, device.architecture) == ("hip:0", "gfx942")
    assert outcomes(report)["kernel driver"] == "skipped"
    assert report.failures == ()


def test_amd_smi_out_of_reach_does_not_cost_the_device(look):
    def unreachable():
        raise OSError("libamd_smi.so")

    report = look("mi300x", smi=unreachable)
    assert len(report.devices) == 1
    assert outcomes(report)["AMD SMI"] == "skipped"


def test_a_torch_without_rocm_brings_no_device_and_says_what_to_install(look, make_torch):
    report = look("mi300x", torch_build=lambda: make_torch(hip=None, version="2.13.0+cpu"))
    assert report.devices == ()
    assert "built without ROCm" in detail(report, "torch")


@pytest.mark.parametrize(("product", "hip", "needed"), [("mi350x", "6.4.43482", "7.0"), ("rx9070", "6.3.42131", "6.4")])
def test_a_hip_older_than_the_chip_is_refused_with_both_numbers(look, make_torch, product, hip, needed):
    report = look(product, torch_build=lambda: make_torch(product, hip=hip))
    assert report.devices == ()
    refusal = detail(report, "kernels for device 0")
    assert hip in refusal
    assert needed in refusal


def test_an_old_torch_is_refused_with_both_numbers(look, make_torch):
    report = look("mi300x", torch_build=lambda: make_torch("mi300x", version="2.5.1+rocm6.2"))
    assert report.devices == ()
    assert "2.5.1" in detail(report, "torch")
    assert "2.10" in detail(report, "torch")


def test_a_chip_without_kernels_is_named_with_those_that_have_them(look):
    report = look("vega")
    assert "gfx906" in detail(report, "kernels for device 0")
    assert "gfx942" in detail(report, "kernels for device 0")


def test_graphics_in_a_processor_share_its_memory(look):
    (device,) = look("apu").devices
    assert device.memory_kind == "unified"
    assert device.id == "PCI-0000:64:00.0"


@pytest.mark.parametrize("variable", ["HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"])
def test_visible_device_variables_are_reported(look, make_torch, variable):
    report = look("mi300x", "mi300x", environ={variable: "1"}, torch_build=lambda: make_torch("mi300x"))
    assert f"{variable}=1" in detail(report, "visible devices")
    assert len(report.devices) == 1


def test_two_visible_device_variables_are_pointed_out(look):
    report = look("mi300x", environ={"HIP_VISIBLE_DEVICES": "0", "ROCR_VISIBLE_DEVICES": "0"})
    assert outcomes(report)["visible devices, combined"] == "skipped"


def test_a_hidden_gpu_is_not_taken_for_the_visible_one(look):
    """The second of two GPUs is visible alone: by its address it is the second node, whatever its position."""
    from dataclasses import replace as changed

    from vllm_rocm.probe import TorchBuild, TorchDevice

    second = TorchDevice(0, "AMD Instinct MI300X", "gfx942", 304, 1, pci="0000:06:00.0")
    report = look("mi300x", "mi300x", torch_build=lambda: TorchBuild("2.11.0", "7.0.0", (second,)))
    assert report.devices[0].properties["node"] == "2"
    unknown = changed(second, pci="")
    report = look("mi300x", "mi300x", torch_build=lambda: TorchBuild("2.11.0", "7.0.0", (unknown,)))
    assert "node" not in report.devices[0].properties


def test_an_overridden_architecture_is_pointed_out(look):
    report = look("rx7900", environ={"HSA_OVERRIDE_GFX_VERSION": "11.0.0"})
    assert "HSA_OVERRIDE_GFX_VERSION=11.0.0" in detail(report, "architecture override")


@pytest.mark.parametrize(("version", "outcome"), [("0.1.7.post2", "ok"), ("0.1.4", "failed"), ("0.2.0", "failed")])
def test_aiter_counts_in_the_versions_whose_signatures_are_known(look, version, outcome):
    report = look("mi300x", aiter=lambda: version)
    assert outcomes(report)["AITER"] == outcome
    assert report.devices[0].properties.get("aiter") == (version if outcome == "ok" else None)
    if outcome == "failed":
        assert version in detail(report, "AITER")
        assert ">=0.1.7,<0.2" in detail(report, "AITER")


def test_files_that_may_not_be_opened_are_named_with_the_groups(look, tmp_path, monkeypatch):
    monkeypatch.setattr(topology.os, "access", lambda path, mode: not str(path).endswith("kfd"))
    report = look("mi300x")
    assert "/dev/kfd" in detail(report, "device files")
    assert "render" in hint(report, "device files")


@pytest.mark.parametrize(
    ("number", "name"), [(90010, "gfx90a"), (90402, "gfx942"), (90500, "gfx950"), (110000, "gfx1100"), (120001, "gfx1201")]
)
def test_a_target_number_is_an_architecture(number, name):
    assert topology.architecture_of(number) == name


def test_a_library_that_is_not_the_runtime_is_refused_by_the_missing_call():
    with pytest.raises(DriverError, match="hipInit"):
        Driver(names=["libc.so.6"])


def test_a_library_that_is_not_amd_smi_is_refused_by_the_missing_call():
    with pytest.raises(DriverError, match="amdsmi_init"):
        smi_sockets(["libc.so.6"])


def test_a_missing_runtime_is_named():
    with pytest.raises(OSError, match="libnothing"):
        Driver(names=["libnothing.so"])
