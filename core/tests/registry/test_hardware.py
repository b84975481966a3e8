from __future__ import annotations

import pytest

from vllm_core.registry.hardware import KnownPlugin, known_plugins, scan


def pci(root, address, vendor, pci_class):
    folder = root / "sys/bus/pci/devices" / address
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(f"{vendor}\n")
    (folder / "class").write_text(f"{pci_class}\n")


def touch(root, path):
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text("")


def platforms(root):
    return [one.plugin.platform for one in scan(root)]


def test_an_empty_machine_shows_nothing(empty_root):
    assert scan(empty_root) == ()


@pytest.mark.parametrize(
    ("vendor", "pci_class", "expected"),
    [
        ("0x10de", "0x030200", ["cuda"]),
        ("0x1002", "0x038000", ["rocm"]),
        ("0x8086", "0x038000", ["xpu"]),
        ("0x19e5", "0x120000", ["ascend"]),
        ("0x8086", "0x060000", []),  # an Intel bridge is no GPU
        ("0x10de", "0x040300", []),  # nor is a card's audio function
        ("0x1a03", "0x030000", []),  # nor a server's management display
    ],
)
def test_pci_ids_are_told_apart_by_vendor_and_class(empty_root, vendor, pci_class, expected):
    pci(empty_root, "0000:01:00.0", vendor, pci_class)
    assert platforms(empty_root) == expected


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("dev/nvidia0", ["cuda"]),
        ("dev/nvidiactl", []),
        ("usr/lib/wsl/lib/libcuda.so.1", ["cuda"]),
        ("dev/kfd", ["rocm"]),
        ("dev/davinci3", ["ascend"]),
        ("dev/davinci_manager", []),
    ],
)
def test_device_files_are_recognised_by_pattern(empty_root, path, expected):
    touch(empty_root, path)
    assert platforms(empty_root) == expected


def test_the_evidence_is_named(empty_root):
    pci(empty_root, "0000:41:00.0", "0x10de", "0x030200")
    touch(empty_root, "dev/nvidia0")
    (sighting,) = scan(empty_root)
    assert str(sighting) == "NVIDIA GPU seen (/sys/bus/pci/devices/0000:41:00.0, /dev/nvidia0)"


def test_a_device_whose_files_cannot_be_read_is_passed_over(empty_root):
    (empty_root / "sys/bus/pci/devices/0000:01:00.0/vendor").mkdir(parents=True)
    pci(empty_root, "0000:02:00.0", "0x1002", "0x030000")
    assert platforms(empty_root) == ["rocm"]


def test_a_plugin_without_patterns_is_never_seen(empty_root):
    touch(empty_root, "dev/null")
    pci(empty_root, "0000:02:00.0", "0x1002", "0x030000")
    assert scan(empty_root, [KnownPlugin(distribution="d", platform="p", install="i")]) == ()


def test_the_data_file_answers_for_each_of_our_distributions():
    rows = {plugin.distribution: plugin for plugin in known_plugins()}
    assert set(rows) == {"vllm-cpu", "vllm-cuda", "vllm-rocm", "vllm-xpu", "vllm-ascend"}
    for name, row in rows.items():
        assert row.platform == name.removeprefix("vllm-")
        assert f"./plugins/{name}" in row.install
        assert bool(row.hardware) == (row.platform != "cpu")
