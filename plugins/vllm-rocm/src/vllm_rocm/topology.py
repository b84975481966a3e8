"""GPUs as the kernel driver describes them: the KFD topology in sysfs. Small files are read, no device is opened.

Sources: the Linux kernel's ``drivers/gpu/drm/amd/amdkfd/kfd_topology.c`` (names and units of the properties;
``gfx_target_version`` is major * 10000 + minor * 100 + stepping) and ``Documentation/gpu/amdgpu`` (partition modes).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

NODES = "sys/class/kfd/kfd/topology/nodes"
DRIVER = "sys/module/amdgpu"

_HEAP_LOCAL_PUBLIC, _HEAP_LOCAL_PRIVATE = 1, 2
_LINKS = {2: "PCIe", 11: "XGMI"}


@dataclass(frozen=True, slots=True)
class Node:
    """One GPU of the topology, or one partition of it. `links` by the number of the other node, with what they run over."""

    number: int
    name: str
    architecture: str
    compute_units: int
    wave_size: int
    lds_bytes: int
    memory_bytes: int
    pci: str
    unique_id: int
    render_minor: int
    xccs: int
    integrated: bool
    compute_partition: str
    memory_partition: str
    links: Mapping[int, str]

    @property
    def id(self) -> str:
        """The driver's own number of the chip, which is the same after a reboot; the PCI address of chips that have none.

        Partitions of a chip share its number: the node tells them apart.
        """
        base = f"GPU-{self.unique_id:016x}" if self.unique_id else f"PCI-{self.pci}"
        whole = self.compute_partition in ("", "SPX")
        return base if whole else f"{base}/{self.number}"


def driver_version(root: Path) -> str:
    """Version of the amdgpu module: its own where it is installed beside the kernel, else empty (the kernel's)."""
    return _text(root / DRIVER / "version")


def driver_loaded(root: Path) -> bool:
    """Whether the kernel has the module."""
    return (root / DRIVER).is_dir()


def nodes(root: Path) -> tuple[Node, ...]:
    """All GPUs, in the order in which the runtime counts them."""
    folders = [path for path in (root / NODES).glob("*") if path.name.isdigit()]
    read = (_node(root, folder) for folder in sorted(folders, key=lambda path: int(path.name)))
    return tuple(node for node in read if node is not None)


def device_files(root: Path, found: tuple[Node, ...]) -> dict[str, bool]:
    """The files through which programs reach the GPUs, and whether this user may open each; missing ones are not in it."""
    names = ["dev/kfd", *(f"dev/dri/renderD{node.render_minor}" for node in found if node.render_minor > 0)]
    paths = [root / name for name in dict.fromkeys(names)]
    return {f"/{path.relative_to(root)}": os.access(path, os.R_OK | os.W_OK) for path in paths if path.exists()}


def missing_files(root: Path, found: tuple[Node, ...]) -> tuple[str, ...]:
    """Those that the topology speaks of and that are not there: a container got the one and not the other."""
    names = ["dev/kfd", *(f"dev/dri/renderD{node.render_minor}" for node in found if node.render_minor > 0)]
    return tuple(f"/{name}" for name in dict.fromkeys(names) if not (root / name).exists())


def architecture_of(version: int) -> str:
    """``gfx942`` of 90402: the stepping is one hexadecimal digit."""
    major, minor, stepping = version // 10000, version // 100 % 100, version % 100
    return f"gfx{major}{minor:x}{stepping:x}"


def _node(root: Path, folder: Path) -> Node | None:
    values = _numbers(folder / "properties")
    version = values.get("gfx_target_version", 0)
    if not version or not values.get("simd_count", 0):
        return None  # a processor
    location, minor = values.get("location_id", 0), values.get("drm_render_minor", 0)
    card = root / f"sys/class/drm/renderD{minor}/device"
    banks = [_numbers(path) for path in sorted((folder / "mem_banks").glob("*/properties"))]
    local = [bank for bank in banks if bank.get("heap_type") in (_HEAP_LOCAL_PUBLIC, _HEAP_LOCAL_PRIVATE)]
    return Node(
        number=int(folder.name),
        name=_text(folder / "name") or architecture_of(version),
        architecture=architecture_of(version),
        compute_units=values["simd_count"] // max(1, values.get("simd_per_cu", 1)),
        wave_size=values.get("wave_front_size", 0),
        lds_bytes=values.get("lds_size_in_kb", 0) << 10,
        memory_bytes=sum(bank.get("size_in_bytes", 0) for bank in local),
        pci=f"{values.get('domain', 0):04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.{location & 7}",
        unique_id=values.get("unique_id", 0),
        render_minor=minor,
        xccs=max(1, values.get("num_xcc", 1)),
        # One node with cores and SIMDs is a processor with graphics in it.
        integrated=values.get("cpu_cores_count", 0) > 0,
        compute_partition=_text(card / "current_compute_partition"),
        memory_partition=_text(card / "current_memory_partition"),
        links=_links(folder),
    )


def _links(folder: Path) -> dict[int, str]:
    found = {}
    for path in sorted((folder / "io_links").glob("*/properties")):
        link = _numbers(path)
        if "node_to" in link:
            found[link["node_to"]] = _LINKS.get(link.get("type", 0), f"type {link.get('type', 0)}")
    return found


def _numbers(path: Path) -> dict[str, int]:
    """A file of lines ``name number``; what has another form is left out."""
    pairs = (line.split() for line in _text(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _text(path: Path) -> str:
    """Contents of a small file; empty where it is missing or closed to us, as sysfs files in containers may be."""
    try:
        return path.read_text("ascii", "replace").strip()
    except OSError:
        return ""
