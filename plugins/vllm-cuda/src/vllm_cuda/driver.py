"""The CUDA driver and NVML through ctypes: facts only, no context is created.

CUDA Driver API reference, sections "Device Management" and "Error Handling"; NVML API reference.
"""

from __future__ import annotations

import ctypes
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace

PROFILE = " MIG "
"""Stands between the name of a GPU and the profile of an instance of it."""

_MAJOR, _MINOR, _MULTIPROCESSORS, _INTEGRATED, _L2, _SHARED = 75, 76, 16, 18, 38, 97


class DriverError(Exception):
    """A call failed; the text says which and how."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device as the driver reports it, in the order of its enumeration."""

    index: int
    id: str
    name: str
    capability: tuple[int, int]
    memory_bytes: int
    integrated: bool
    multiprocessors: int
    l2_bytes: int
    shared_bytes: int
    links: tuple[tuple[str, str], ...] = ()
    """Ids of the other GPUs, and whether this one reaches their memory."""

    @property
    def architecture(self) -> str:
        """Such as ``sm_90``."""
        return f"sm_{self.capability[0]}{self.capability[1]}"

    @property
    def instance(self) -> str:
        """The profile of a part that MIG cut off a GPU, such as ``3g.20gb``; empty for a whole GPU."""
        return self.name.partition(PROFILE)[2]


def id_of(raw: bytes, name: str) -> str:
    """What CUDA_VISIBLE_DEVICES calls a device: of an instance of MIG the driver gives the instance's UUID."""
    return f"{'MIG' if PROFILE in name else 'GPU'}-{uuid.UUID(bytes=raw)}"


class Driver:
    """libcuda.so.1, initialised. Raises OSError where it is missing, DriverError where it does not start."""

    def __init__(self, library: str = "libcuda.so.1") -> None:
        self._library = ctypes.CDLL(library)
        self.call("cuInit", 0)

    def version(self) -> tuple[int, int]:
        """Newest CUDA version that the driver supports."""
        value = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(value))
        return value.value // 1000, value.value % 1000 // 10

    def gpus(self) -> tuple[Gpu, ...]:
        """All devices that this process may see."""
        count = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(count))
        found = [self._gpu(index) for index in range(count.value)]
        return tuple(replace(gpu, links=self._links(gpu, found)) for gpu in found)

    def _links(self, gpu: Gpu, all_gpus: list[Gpu]) -> tuple[tuple[str, str], ...]:
        others = [one for one in all_gpus if one.index != gpu.index]
        return tuple((one.id, "peer access" if self.reaches(gpu.index, one.index) else "no peer access") for one in others)

    def _gpu(self, index: int) -> Gpu:
        device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(device), index)
        name, raw, size = ctypes.create_string_buffer(128), (ctypes.c_ubyte * 16)(), ctypes.c_size_t()
        self.call("cuDeviceGetName", name, len(name), device)
        self.call("cuDeviceGetUuid_v2", ctypes.byref(raw), device)
        self.call("cuDeviceTotalMem_v2", ctypes.byref(size), device)

        def attribute(number: int) -> int:
            value = ctypes.c_int()
            self.call("cuDeviceGetAttribute", ctypes.byref(value), number, device)
            return value.value

        return Gpu(
            index=index,
            id=id_of(bytes(raw), text := name.value.decode(errors="replace")),
            name=text,
            capability=(attribute(_MAJOR), attribute(_MINOR)),
            memory_bytes=size.value,
            integrated=bool(attribute(_INTEGRATED)),
            multiprocessors=attribute(_MULTIPROCESSORS),
            l2_bytes=attribute(_L2),
            shared_bytes=attribute(_SHARED),
        )

    def reaches(self, index: int, other: int) -> bool:
        """Whether device ``index`` can read and write the memory of device ``other``."""
        device, peer, answer = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(device), index)
        self.call("cuDeviceGet", ctypes.byref(peer), other)
        self.call("cuDeviceCanAccessPeer", ctypes.byref(answer), device, peer)
        return bool(answer.value)

    def call(self, name: str, *arguments: object) -> None:
        """Call a function of the driver. Raises DriverError with its name for the status."""
        status = self.function(name)(*arguments)
        if status:
            raise self.error(name, status)

    def function(self, name: str) -> Callable[..., int]:
        """A function of the driver, which returns a status. Raises DriverError where it has none of this name."""
        found: Callable[..., int] | None = getattr(self._library, name, None)
        if found is None:
            raise DriverError(f"{name} is missing in the driver")
        return found

    def error(self, name: str, status: int) -> DriverError:
        """What a function's status means."""
        text = ctypes.c_char_p()
        self._library.cuGetErrorName(status, ctypes.byref(text))
        return DriverError(f"{name}: {(text.value or b'unknown error').decode()} ({status})")


def nvml_version(library: str = "libnvidia-ml.so.1") -> str:
    """The driver's own version through NVML. Raises OSError or DriverError."""
    nvml = ctypes.CDLL(library)
    status = nvml.nvmlInit_v2()
    if status:
        raise DriverError(f"nvmlInit_v2: status {status}")
    try:
        text = ctypes.create_string_buffer(96)
        status = nvml.nvmlSystemGetDriverVersion(text, len(text))
        if status:
            raise DriverError(f"nvmlSystemGetDriverVersion: status {status}")
        return text.value.decode(errors="replace")
    finally:
        nvml.nvmlShutdown()
