"""What the probe says of machines: right, wrong, and half there. Each thing is checked and reported on its own."""

from __future__ import annotations

import pytest

from vllm_ascend import driver


def outcomes(report):
    return {check.name: check.outcome for check in report.checks}


def check_of(report, name):
    return next(check for check in report.checks if check.name == name)


def test_one_chip_with_everything_right(machine):
    report = machine.probe()
    assert set(outcomes(report).values()) == {"ok"}
    (device,) = report.devices
    assert (device.id, device.name, device.architecture) == ("0000:C1:00.0", "Ascend 910B3", "910b")
    assert device.memory_bytes == 64 << 30
    assert (device.driver_version, device.runtime_version) == ("25.5.0", "8.5.0")


def test_eight_chips_are_eight_devices_in_the_drivers_order(machine, listings):
    machine.printed = listings["a2"](8)
    machine.devices(8)
    found = machine.probe().devices
    assert [device.properties["index"] for device in found] == list("01234567")
    assert len({device.id for device in found}) == 8


def test_a_package_of_two_dies_is_two_devices(machine, listings):
    machine.printed = listings["a3"]
    found = machine.probe().devices
    assert [(device.architecture, device.properties["number"]) for device in found] == [("910c", "0"), ("910c", "1")]


def test_visible_devices_are_numbered_from_0(machine, listings):
    machine.printed = listings["a2"](4)
    machine.environ = {"ASCEND_RT_VISIBLE_DEVICES": "3,1"}
    found = machine.probe().devices
    assert [(device.properties["index"], device.properties["number"]) for device in found] == [("0", "3"), ("1", "1")]


def test_a_visible_device_that_is_not_there_is_said(machine):
    machine.environ = {"ASCEND_RT_VISIBLE_DEVICES": "5"}
    report = machine.probe()
    assert not report.devices
    assert "names '5'; there are 0" in check_of(report, "ASCEND_RT_VISIBLE_DEVICES").detail


def test_a_machine_without_npu_fails_every_check_with_a_hint(machine, listings):
    machine.printed = listings["missing"]
    for path in ("dev/*", "usr/local/Ascend/driver/*", "usr/local/Ascend/ascend-toolkit/latest/*/*"):
        machine.without(path)
    machine.versions = {"torch": "2.13.0"}
    report = machine.probe()
    assert not report.devices
    assert outcomes(report) == dict.fromkeys(("npu-smi", "driver", "device files", "CANN", "torch_npu"), "failed")
    assert all(check.hint for check in report.failures)


def test_a_broken_driver_is_said_in_its_own_words(machine, listings):
    machine.printed = listings["broken"]
    report = machine.probe()
    assert not report.devices
    assert check_of(report, "npu-smi").detail == "dcmi module initialize failed. ret is -8005"
    assert outcomes(report)["driver"] == "ok"


def test_an_old_toolkit_is_refused_with_both_numbers(machine):
    machine.toolkit("8.1.RC1")
    report = machine.probe()
    assert not report.devices
    assert "8.1.RC1" in check_of(report, "CANN").detail
    assert "expected CANN >=8.5" in check_of(report, "CANN").detail


@pytest.mark.parametrize(
    ("versions", "text"),
    [
        ({"torch": "2.13.0"}, "not installed"),
        ({"torch": "2.12.1", "torch_npu": "2.13.0"}, "2.13.0, with torch 2.12.1"),
        ({"torch": "2.9.0", "torch_npu": "2.9.0"}, "found torch_npu 2.9.0, expected torch_npu ==2.13.*"),
    ],
)
def test_a_torch_npu_that_does_not_fit_is_refused_with_both_numbers(machine, versions, text):
    machine.versions = versions
    report = machine.probe()
    assert not report.devices
    assert text in check_of(report, "torch_npu").detail


def test_a_torch_npu_without_cann_is_said_to_break_torch(machine):
    machine.without("usr/local/Ascend/ascend-toolkit/latest/*/*")
    check = check_of(machine.probe(), "torch_npu")
    assert check.outcome == "failed"
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in check.hint


def test_a_container_without_device_files_is_told_how_to_get_them(machine, listings):
    machine.printed = listings["broken"]
    machine.without("dev/*")
    check = check_of(machine.probe(), "device files")
    assert check.outcome == "failed"
    assert "--device /dev/davinci0" in check.hint


def test_chips_that_answer_without_device_files_are_usable(machine):
    machine.without("dev/*")
    report = machine.probe()
    assert outcomes(report)["device files"] == "skipped"
    assert len(report.devices) == 1


def test_a_driver_elsewhere_is_found_where_its_installer_wrote_it(machine):
    machine.without("usr/local/Ascend/driver/*")
    machine.write("etc/ascend_install.info", "Driver_Install_Path_Param=/opt/huawei\n")
    machine.write("opt/huawei/driver/version.info", "Version=24.1.0\n")
    assert check_of(machine.probe(), "driver").detail == "version 24.1.0"


def test_the_toolkit_that_the_environment_names_goes_first(machine):
    machine.write("opt/cann/ascend_toolkit_install.info", "version=8.6.1\n")
    machine.environ = {"ASCEND_HOME_PATH": str(machine.root / "opt/cann")}
    assert machine.probe().devices[0].runtime_version == "8.6.1"


@pytest.mark.parametrize(
    ("name", "health", "text"),
    [("310P3", "OK", "neither Atlas A2 nor A3"), ("910B3", "Critical", "health Critical")],
)
def test_a_chip_that_cannot_be_used_says_why(machine, listings, name, health, text):
    machine.printed = listings["a2"](1, name, health)
    assert not machine.probe().devices
    assert text in check_of(machine.probe(), "chip 0").detail


def test_text_that_is_no_table_is_refused():
    with pytest.raises(driver.ToolError, match="permission denied"):
        driver.read_listing("\n  permission denied\n")


def test_a_tool_that_fails_or_is_missing_is_told_apart(tmp_path):
    tool = tmp_path / "npu-smi"
    with pytest.raises(FileNotFoundError):
        driver.run_tool({"PATH": str(tmp_path)}, tmp_path)
    tool.write_text("#!/bin/sh\necho dcmi model initialized failed >&2\nexit 2\n")
    tool.chmod(0o755)
    with pytest.raises(driver.ToolError, match="dcmi model initialized failed"):
        driver.run_tool({"PATH": f"{tmp_path}:/bin:/usr/bin"}, tmp_path)
