"""Machines that are not here: the driver's files in a folder, a runtime that answers from a table, a torch that counts.

Property names and values follow the kernel's ``kfd_topology.c`` and what AMD's documentation prints of such machines.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from vllm_core.api import DeviceFacts
from vllm_rocm.driver import Visible
from vllm_rocm.probe import TorchBuild, TorchDevice, probe

HIP_7 = "7.0.51831"


@dataclass(frozen=True)
class Gpu:
    """A product as the topology and torch describe it."""

    name: str
    architecture: str
    target: int
    simds: int
    simd_per_unit: int
    wave: int
    lds_kib: int
    memory_bytes: int
    xccs: int = 1
    partition: str = ""
    unique_id: int = 0x1F2A3B4C5D6E7F80
    cores: int = 0
    bus: int = 5

    @property
    def multiprocessors(self) -> int:
        """As torch counts: on RDNA two compute units are one."""
        return self.simds // 4


MI300X = Gpu("AMD Instinct MI300X", "gfx942", 90402, 1216, 4, 64, 64, 206141652992, 8, "SPX")
MI250X = Gpu("AMD Instinct MI250X", "gfx90a", 90010, 440, 4, 64, 64, 68702699520)
MI350X = Gpu("AMD Instinct MI350X", "gfx950", 90500, 1024, 4, 64, 160, 309220868096, 8, "SPX")
RX7900 = Gpu("AMD Radeon RX 7900 XTX", "gfx1100", 110000, 192, 2, 32, 64, 25753026560)
RX9070 = Gpu("AMD Radeon RX 9070 XT", "gfx1201", 120001, 128, 2, 32, 64, 17095983104)
CPX = replace(MI300X, simds=152, memory_bytes=206141652992 // 8, xccs=1, partition="CPX")
APU = Gpu("AMD Radeon Graphics", "gfx1103", 110003, 24, 2, 32, 64, 536870912, unique_id=0, cores=16, bus=0x64)
VEGA = Gpu("AMD Radeon VII", "gfx906", 90006, 240, 4, 64, 64, 17163091968)

PRODUCTS = {
    "mi300x": MI300X,
    "mi250x": MI250X,
    "mi350x": MI350X,
    "rx7900": RX7900,
    "rx9070": RX9070,
    "cpx": CPX,
    "apu": APU,
    "vega": VEGA,
}


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def write_machine(root: Path, gpus: list[Gpu], *, files: bool = True, version: str = "6.12.12", linked: bool = False) -> Path:
    """sysfs and device files below ``root``: node 0 is the processor, a GPU's node its place in the list plus one."""
    write(root / "sys/module/amdgpu/version", f"{version}\n")
    nodes = root / "sys/class/kfd/kfd/topology/nodes"
    write(nodes / "0/properties", "cpu_cores_count 96\nsimd_count 0\ngfx_target_version 0\n")
    shared = any(gpu.partition == "CPX" for gpu in gpus)
    for place, gpu in enumerate(gpus, 1):
        minor, bus = 127 + place, gpu.bus if shared else gpu.bus + place - 1
        properties = {
            "cpu_cores_count": gpu.cores,
            "simd_count": gpu.simds,
            "simd_per_cu": gpu.simd_per_unit,
            "wave_front_size": gpu.wave,
            "lds_size_in_kb": gpu.lds_kib,
            "gfx_target_version": gpu.target,
            "vendor_id": 4098,
            "location_id": bus << 8,
            "domain": 0,
            "drm_render_minor": minor,
            "num_xcc": gpu.xccs,
            "unique_id": gpu.unique_id and gpu.unique_id + (0 if shared else place - 1),
        }
        folder = nodes / str(place)
        write(folder / "properties", "".join(f"{name} {value}\n" for name, value in properties.items()))
        write(folder / "name", f"{gpu.name.split()[-1].lower()}\n")
        write(folder / "mem_banks/0/properties", f"heap_type 1\nsize_in_bytes {gpu.memory_bytes}\n")
        others = [other for other in range(1, len(gpus) + 1) if other != place] if linked else []
        for number, other in enumerate([0, *others]):
            kind = 11 if other else 2
            write(folder / f"io_links/{number}/properties", f"type {kind}\nnode_from {place}\nnode_to {other}\n")
        card = root / f"sys/class/drm/renderD{minor}/device"
        if gpu.partition:
            write(card / "current_compute_partition", f"{gpu.partition}\n")
            write(card / "current_memory_partition", "NPS1\n")
        if files:
            write(root / f"dev/dri/renderD{minor}", "")
    if files:
        write(root / "dev/kfd", "")
    return root


def torch_of(gpus: list[Gpu], *, hip: str | None = HIP_7, version: str = "2.11.0+rocm7.0", error: str = "") -> TorchBuild:
    shared = any(gpu.partition == "CPX" for gpu in gpus)
    devices = tuple(
        TorchDevice(
            index=index,
            name=gpu.name,
            architecture=gpu.architecture,
            compute_units=gpu.multiprocessors,
            memory_bytes=gpu.memory_bytes,
            pci=f"0000:{gpu.bus if shared else gpu.bus + index:02x}:00.0",
        )
        for index, gpu in enumerate(gpus)
    )
    return TorchBuild(version, hip, () if error or hip is None else devices, error)


@dataclass
class FakeHip:
    """A runtime that answers."""

    devices_: tuple[Visible, ...]
    library: str = "libamdhip64.so.7"

    def version(self) -> tuple[int, int]:
        return 7, 0

    def devices(self) -> tuple[Visible, ...]:
        return self.devices_


def fake_hip(gpus: list[Gpu]) -> FakeHip:
    return FakeHip(tuple(Visible(i, gpu.name, f"0000:{gpu.bus + i:02x}:00.0", gpu.memory_bytes) for i, gpu in enumerate(gpus)))


@pytest.fixture
def products() -> dict[str, Gpu]:
    return PRODUCTS


@pytest.fixture
def look(tmp_path, probe_in):
    """Probe a machine of the named products; keywords replace what one source says."""
    return lambda *names, **sources: probe_in(tmp_path, *names, **sources)


@pytest.fixture(scope="session")
def probe_in():
    """As `look`, with the machine's files in a folder of one's choice."""

    def probe_machine(
        root: Path, *names: str, files: bool = True, linked: bool = False, environ=None, sysfs: bool = True, **sources
    ):
        gpus = [PRODUCTS[name] for name in names]
        if sysfs:
            write_machine(root, gpus, files=files, linked=linked)
        given = {
            "hip": lambda: fake_hip(gpus),
            "smi": lambda: len(gpus),
            "torch_build": lambda: torch_of(gpus),
            "aiter": lambda: None,
            **sources,
        }
        return probe(root, environ or {}, **given)

    return probe_machine


@pytest.fixture(scope="session")
def make_torch():
    return lambda *names, **changes: torch_of([PRODUCTS[name] for name in names], **changes)


@pytest.fixture
def make_facts():
    def make(architecture: str = "gfx942", **properties: str) -> DeviceFacts:
        return DeviceFacts(
            id="GPU-0",
            name="a GPU",
            device_type="hip",
            architecture=architecture,
            memory_kind="discrete",
            memory_bytes=64 << 30,
            properties={"index": "0", "multiprocessors": "304", **properties},
        )

    return make
