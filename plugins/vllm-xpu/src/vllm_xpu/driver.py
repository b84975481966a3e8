"""Level Zero through ctypes: does the loader answer, and which devices does it count? Facts only, no context is created.

oneAPI Level Zero specification, core API, version 1: ``zeInit``, ``zeDriverGet``, ``zeDeviceGet``, ``zeDeviceGetProperties``,
``zeDeviceGetMemoryProperties``. The structures are those of its headers, which a major version keeps.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

_DRIVER_PROPERTIES, _DEVICE_PROPERTIES, _MEMORY_PROPERTIES = 0x1, 0x3, 0x7
_GPU, _INTEGRATED = 1, 1
_GPU_ONLY = 1


class DriverError(Exception):
    """A call failed; the text says which and how."""


class _DriverProperties(ctypes.Structure):
    _fields_ = (
        ("stype", ctypes.c_uint32),
        ("next", ctypes.c_void_p),
        ("uuid", ctypes.c_uint8 * 16),
        ("driver_version", ctypes.c_uint32),
    )


class _DeviceProperties(ctypes.Structure):
    _fields_ = (
        ("stype", ctypes.c_uint32),
        ("next", ctypes.c_void_p),
        ("type", ctypes.c_uint32),
        ("vendor_id", ctypes.c_uint32),
        ("device_id", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("subdevice_id", ctypes.c_uint32),
        ("clock_rate", ctypes.c_uint32),
        ("max_alloc", ctypes.c_uint64),
        ("max_contexts", ctypes.c_uint32),
        ("max_priority", ctypes.c_uint32),
        ("threads_per_engine", ctypes.c_uint32),
        ("simd_width", ctypes.c_uint32),
        ("engines_per_subslice", ctypes.c_uint32),
        ("subslices_per_slice", ctypes.c_uint32),
        ("slices", ctypes.c_uint32),
        ("timer_resolution", ctypes.c_uint64),
        ("timestamp_bits", ctypes.c_uint32),
        ("kernel_timestamp_bits", ctypes.c_uint32),
        ("uuid", ctypes.c_uint8 * 16),
        ("name", ctypes.c_char * 256),
    )


class _MemoryProperties(ctypes.Structure):
    _fields_ = (
        ("stype", ctypes.c_uint32),
        ("next", ctypes.c_void_p),
        ("flags", ctypes.c_uint32),
        ("clock_rate", ctypes.c_uint32),
        ("bus_width", ctypes.c_uint32),
        ("total_size", ctypes.c_uint64),
        ("name", ctypes.c_char * 256),
    )


@dataclass(frozen=True, slots=True)
class Visible:
    """One device as Level Zero counts it, after ZE_AFFINITY_MASK and ZE_FLAT_DEVICE_HIERARCHY. `uuid` is in hexadecimal."""

    name: str
    device_id: int
    uuid: str
    integrated: bool
    memory_bytes: int
    driver_version: str


class Driver:
    """The loader, initialised. Raises OSError where it is missing, DriverError where it does not start."""

    def __init__(self, library: str = "libze_loader.so.1") -> None:
        self._zero = ctypes.CDLL(library)
        self._call("zeInit", _GPU_ONLY)

    def devices(self) -> tuple[Visible, ...]:
        """All GPUs of all drivers, in the order of their enumeration."""
        found: list[Visible] = []
        for driver in self._handles("zeDriverGet"):
            facts = _DriverProperties(stype=_DRIVER_PROPERTIES)
            self._call("zeDriverGetProperties", driver, ctypes.byref(facts))
            found += self._of_driver(driver, f"{facts.driver_version:#010x}")
        return tuple(found)

    def _of_driver(self, driver: ctypes.c_void_p, version: str) -> Sequence[Visible]:
        read = (self._device(device, version) for device in self._handles("zeDeviceGet", driver))
        return [one for one in read if one is not None]

    def _device(self, device: ctypes.c_void_p, version: str) -> Visible | None:
        facts = _DeviceProperties(stype=_DEVICE_PROPERTIES)
        self._call("zeDeviceGetProperties", device, ctypes.byref(facts))
        if facts.type != _GPU:
            return None
        return Visible(
            name=facts.name.decode(errors="replace"),
            device_id=facts.device_id,
            uuid=bytes(facts.uuid).hex(),
            integrated=bool(facts.flags & _INTEGRATED),
            memory_bytes=self._memory(device),
            driver_version=version,
        )

    def _memory(self, device: ctypes.c_void_p) -> int:
        count = ctypes.c_uint32()
        self._call("zeDeviceGetMemoryProperties", device, ctypes.byref(count), None)
        pools = (_MemoryProperties * count.value)()
        for pool in pools:
            pool.stype = _MEMORY_PROPERTIES
        self._call("zeDeviceGetMemoryProperties", device, ctypes.byref(count), pools)
        return sum(pool.total_size for pool in pools)

    def _handles(self, name: str, *before: ctypes.c_void_p) -> list[ctypes.c_void_p]:
        """Everything that a call lists: it is asked for the number first."""
        count = ctypes.c_uint32()
        self._call(name, *before, ctypes.byref(count), None)
        handles = (ctypes.c_void_p * count.value)()
        self._call(name, *before, ctypes.byref(count), handles)
        return [ctypes.c_void_p(handle) for handle in handles]

    def _call(self, name: str, *arguments: object) -> None:
        function = getattr(self._zero, name, None)
        if function is None:
            raise DriverError(f"{name} is missing in the loader")
        status = function(*arguments)
        if status:
            raise DriverError(f"{name}: status {status & 0xFFFFFFFF:#x}")
