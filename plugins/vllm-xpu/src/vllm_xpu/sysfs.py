"""GPUs as the kernel describes them: PCI devices with a graphics driver. Small files are read, no device is opened.

Sources: the Linux kernel's documentation of sysfs for PCI, and of the drivers i915 and xe.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from vllm_xpu.backends.families import INTEGRATED, architecture_of

_VENDOR = "0x8086"
_GRAPHICS = ("0x0300", "0x0380", "0x1200")
_ON_THE_ROOT_BUS = "0000:00:02.0"
"""Where graphics that are a part of the processor have always been."""


@dataclass(frozen=True, slots=True)
class Card:
    """One PCI device. `driver` is i915 or xe, empty where none has it; `render` its device file, empty where there is none."""

    pci: str
    device_id: int
    driver: str
    render: str

    @property
    def architecture(self) -> str:
        """``pvc``, ``dg2``, ...; the device id where it is none of the known ones."""
        return architecture_of(self.device_id)

    @property
    def integrated(self) -> bool:
        """Whether it is a part of the processor."""
        return self.architecture in INTEGRATED or self.pci == _ON_THE_ROOT_BUS


def cards(root: Path) -> tuple[Card, ...]:
    """All GPUs of the vendor, in the order of their addresses."""
    found = []
    for folder in sorted((root / "sys/bus/pci/devices").glob("*")):
        if _text(folder / "vendor") != _VENDOR or not _text(folder / "class").startswith(_GRAPHICS):
            continue
        nodes = sorted(path.name for path in (folder / "drm").glob("renderD*"))
        driver = (folder / "driver").resolve().name if (folder / "driver").exists() else ""
        found.append(Card(folder.name, int(_text(folder / "device") or "0", 16), driver, nodes[0] if nodes else ""))
    return tuple(found)


def driver_version(root: Path) -> str:
    """Version of the module that was installed beside the kernel; empty where it is the kernel's own."""
    return _text(root / "sys/module/xe/version") or _text(root / "sys/module/i915/version")


def device_file(root: Path, card: Card) -> bool | None:
    """Whether this user may open the card's file; None where it is not there."""
    path = root / "dev/dri" / card.render
    return os.access(path, os.R_OK | os.W_OK) if card.render and path.exists() else None


def _text(path: Path) -> str:
    """Contents of a small file; empty where it is missing or closed to us, as sysfs files in containers may be."""
    try:
        return path.read_text("ascii", "replace").strip()
    except OSError:
        return ""
