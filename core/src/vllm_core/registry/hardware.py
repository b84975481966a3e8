"""Hardware that can be seen without any plugin, from `known_hardware.toml`: files and PCI ids, no driver is opened.

This is how core can say "that GPU needs this package" and refuse to run on the host unasked.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

tomllib: Any = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

MAX_EVIDENCE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownPlugin:
    """One of our own distributions: how it is installed, and what its hardware looks like (empty: the host)."""

    distribution: str
    platform: str
    install: str
    hardware: str = ""
    pci_vendor: str = ""
    pci_classes: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """Hardware of a known plugin, with the files that show it."""

    plugin: KnownPlugin
    evidence: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.plugin.hardware} seen ({', '.join(self.evidence[:MAX_EVIDENCE])})"


@cache
def known_plugins() -> tuple[KnownPlugin, ...]:
    """The rows of the data file."""
    rows = tomllib.loads(Path(__file__).with_name("known_hardware.toml").read_text("utf-8"))["plugin"]
    return tuple(
        KnownPlugin(
            distribution=row["distribution"],
            platform=row["platform"],
            install=row["install"],
            hardware=row.get("hardware", ""),
            pci_vendor=row.get("pci", {}).get("vendor", ""),
            pci_classes=tuple(row.get("pci", {}).get("classes", ())),
            paths=tuple(row.get("paths", ())),
        )
        for row in rows
    )


def scan(root: Path = Path("/"), known: Sequence[KnownPlugin] | None = None) -> tuple[Sighting, ...]:
    """Look below ``root`` for the hardware of known plugins. Reads names and small files of /sys and /dev only."""
    devices = _pci_devices(root)
    sightings = []
    for plugin in known_plugins() if known is None else known:
        evidence = [
            path
            for path, vendor, pci_class in devices
            if vendor == plugin.pci_vendor and pci_class.startswith(plugin.pci_classes)
        ]
        for pattern in plugin.paths:
            evidence += [f"/{path.relative_to(root)}" for path in sorted(root.glob(pattern))]
        if evidence:
            sightings.append(Sighting(plugin=plugin, evidence=tuple(evidence)))
    return tuple(sightings)


def _pci_devices(root: Path) -> list[tuple[str, str, str]]:
    """(path, vendor, class) of each PCI device."""
    found = []
    for folder in sorted((root / "sys/bus/pci/devices").glob("*")):
        vendor, pci_class = _read(folder / "vendor"), _read(folder / "class")
        if vendor and pci_class:
            found.append((f"/{folder.relative_to(root)}", vendor, pci_class))
    return found


def _read(path: Path) -> str:
    """Contents of a small file; empty where it is missing or closed to us, as sysfs files in containers may be."""
    try:
        return path.read_text("ascii", "replace").strip()
    except OSError:
        return ""
