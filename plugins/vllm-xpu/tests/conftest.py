"""Machines that are not here: PCI devices in a folder, a Level Zero that answers from a table, a torch that counts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from vllm_core.api import DeviceFacts
from vllm_xpu.driver import Visible
from vllm_xpu.probe import TorchBuild, TorchDevice, probe


@dataclass(frozen=True)
class Gpu:
    """A product as PCI, Level Zero and torch describe it."""

    name: str
    device_id: int
    pci: str
    memory_bytes: int
    subslices: int
    integrated: bool = False
    driver: str = "xe"


PRODUCTS = {
    "max1550": Gpu("Intel(R) Data Center GPU Max 1550", 0x0BD5, "0000:29:00.0", 68702699520, 64, driver="i915"),
    "a770": Gpu("Intel(R) Arc(TM) A770 Graphics", 0x56A0, "0000:03:00.0", 16225243136, 32, driver="i915"),
    "b580": Gpu("Intel(R) Arc(TM) B580 Graphics", 0xE20B, "0000:04:00.0", 12450791424, 20),
    "lunar": Gpu("Intel(R) Arc(TM) Graphics", 0x64A0, "0000:00:02.0", 31600000000, 8, integrated=True),
    "uhd770": Gpu("Intel(R) UHD Graphics 770", 0x4680, "0000:00:02.0", 31600000000, 2, integrated=True, driver="i915"),
}


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def placed(gpus: list[Gpu]) -> list[tuple[str, Gpu]]:
    """Each with an address of its own: several of a product lie on neighbouring buses."""
    return [(f"{gpu.pci[:5]}{int(gpu.pci[5:7], 16) + place:02x}{gpu.pci[7:]}", gpu) for place, gpu in enumerate(gpus)]


def write_machine(root: Path, gpus: list[Gpu], *, files: bool = True, loaded: bool = True) -> None:
    """sysfs and device files below ``root``."""
    for place, (pci, gpu) in enumerate(placed(gpus)):
        folder = root / "sys/bus/pci/devices" / (gpu.pci if gpu.integrated else pci)
        write(folder / "vendor", "0x8086\n")
        write(folder / "device", f"{gpu.device_id:#06x}\n")
        write(folder / "class", "0x038000\n" if "Max" in gpu.name else "0x030000\n")
        if not loaded:
            continue
        module = root / "sys/bus/pci/drivers" / gpu.driver
        module.mkdir(parents=True, exist_ok=True)
        (folder / "driver").symlink_to(module)
        (folder / f"drm/renderD{128 + place}").mkdir(parents=True)
        if files:
            write(root / f"dev/dri/renderD{128 + place}", "")


class FakeZero:
    """A Level Zero that answers."""

    def __init__(self, gpus: list[Gpu]) -> None:
        self.gpus = gpus

    def devices(self) -> tuple[Visible, ...]:
        return tuple(
            Visible(gpu.name, gpu.device_id, f"{index:032x}", gpu.integrated, gpu.memory_bytes, "0x01060001")
            for index, gpu in enumerate(self.gpus)
        )


def torch_of(gpus: list[Gpu], *, xpu: str | None = "20250301", version: str = "2.11.0+xpu", error: str = "") -> TorchBuild:
    devices = tuple(
        TorchDevice(index, gpu.name, gpu.device_id, gpu.memory_bytes, gpu.subslices, "1.6.33578", uuid=f"{index:032x}")
        for index, gpu in enumerate(gpus)
    )
    return TorchBuild(version, xpu, () if error or xpu is None else devices, error)


@pytest.fixture
def look(tmp_path, probe_in):
    """Probe a machine of the named products; keywords replace what one source says."""
    return lambda *names, **sources: probe_in(tmp_path, *names, **sources)


@pytest.fixture(scope="session")
def probe_in():
    """As `look`, with the machine's files in a folder of one's choice."""

    def probe_machine(
        root: Path, *names: str, files: bool = True, loaded: bool = True, sysfs: bool = True, environ=None, **sources
    ):
        gpus = [PRODUCTS[name] for name in names]
        if sysfs:
            write_machine(root, gpus, files=files, loaded=loaded)
        given = {"zero": lambda: FakeZero(gpus), "torch_build": lambda: torch_of(gpus), "kernels": lambda: None, **sources}
        return probe(root, environ or {}, **given)

    return probe_machine


@pytest.fixture(scope="session")
def make_torch():
    return lambda *names, **changes: torch_of([PRODUCTS[name] for name in names], **changes)


@pytest.fixture
def make_facts():
    def make(architecture: str = "pvc", **properties: str) -> DeviceFacts:
        return DeviceFacts(
            id="GPU-0",
            name="a GPU",
            device_type="xpu",
            architecture=architecture,
            memory_kind="discrete",
            memory_bytes=16 << 30,
            properties={"index": "0", "multiprocessors": "64", **properties},
        )

    return make
