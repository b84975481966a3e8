"""The HIP runtime and AMD SMI through ctypes: does each answer, and what does it say? Facts only.

HIP API reference ("Initialization and Version", "Device Management", "Error Handling"); AMD SMI C API reference. Structures
are left alone, since their layout differs between releases: the calls used here have kept their form.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

HIP_NAMES = ("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so")
SMI_NAMES = ("libamd_smi.so", "libamd_smi.so.26", "libamd_smi.so.25")
_PLACES = ("/opt/rocm/lib",)
_SMI_AMD_GPUS = 1 << 1


class DriverError(Exception):
    """A call failed; the text says which and how."""


@dataclass(frozen=True, slots=True)
class Visible:
    """One device as HIP counts it, after HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES."""

    index: int
    name: str
    pci: str
    memory_bytes: int


class Driver:
    """libamdhip64, initialised. Raises OSError where it is missing, DriverError where it does not start.

    `folders` are looked through first: torch brings a runtime of its own.
    """

    def __init__(self, folders: Iterable[Path] = (), names: Iterable[str] = HIP_NAMES) -> None:
        self.library, self._hip = _open(folders, names)
        self._call("hipInit", 0)

    def version(self) -> tuple[int, int]:
        """Version of the runtime."""
        value = ctypes.c_int()
        self._call("hipRuntimeGetVersion", ctypes.byref(value))
        return value.value // 10_000_000, value.value // 100_000 % 100

    def devices(self) -> tuple[Visible, ...]:
        """All devices that this process may see."""
        count = ctypes.c_int()
        self._call("hipGetDeviceCount", ctypes.byref(count))
        return tuple(self._device(index) for index in range(count.value))

    def _device(self, index: int) -> Visible:
        name, pci, size = ctypes.create_string_buffer(256), ctypes.create_string_buffer(64), ctypes.c_size_t()
        self._call("hipDeviceGetName", name, len(name), index)
        self._call("hipDeviceGetPCIBusId", pci, len(pci), index)
        self._call("hipDeviceTotalMem", ctypes.byref(size), index)
        return Visible(index, name.value.decode(errors="replace"), pci.value.decode("ascii", "replace").lower(), size.value)

    def _call(self, name: str, *arguments: object) -> None:
        function = getattr(self._hip, name, None)
        if function is None:
            raise DriverError(f"{name} is missing in {self.library}")
        status = function(*arguments)
        if status:
            describe = getattr(self._hip, "hipGetErrorName", None)
            text = "unknown error"
            if describe is not None:
                describe.restype = ctypes.c_char_p
                text = (describe(status) or b"unknown error").decode("ascii", "replace")
            raise DriverError(f"{name}: {text} ({status})")


def smi_sockets(names: Iterable[str] = SMI_NAMES) -> int:
    """Sockets with GPUs that AMD SMI counts. Raises OSError or DriverError."""
    library, smi = _open((), names)
    for needed in ("amdsmi_init", "amdsmi_get_socket_handles", "amdsmi_shut_down"):
        if not hasattr(smi, needed):
            raise DriverError(f"{needed} is missing in {library}")
    smi.amdsmi_init.argtypes = [ctypes.c_uint64]
    status = smi.amdsmi_init(_SMI_AMD_GPUS)
    if status:
        raise DriverError(f"amdsmi_init: status {status}")
    try:
        count = ctypes.c_uint32()
        status = smi.amdsmi_get_socket_handles(ctypes.byref(count), None)
        if status:
            raise DriverError(f"amdsmi_get_socket_handles: status {status}")
        return count.value
    finally:
        smi.amdsmi_shut_down()


def _open(folders: Iterable[Path], names: Iterable[str]) -> tuple[str, ctypes.CDLL]:
    """The first library that loads. Raises OSError with what was said of each."""
    names = tuple(names)
    places = [str(folder / name) for folder in folders for name in names if (folder / name).exists()]
    places += [*names, *(f"{place}/{name}" for place in _PLACES for name in names if Path(place, name).exists())]
    said = []
    for place in places:
        try:
            return place, ctypes.CDLL(place)
        except OSError as error:
            said.append(str(error))
    raise OSError(said[-1] if said else "no name to look for")
