"""GPUs that MIG cuts into instances, as NVML lists them: all of the machine, whether this process may see them or not.

NVML API reference, "Multi Instance GPU Management". A process sees one instance of those that CUDA_VISIBLE_DEVICES names, and
the first where it names none.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from vllm_cuda.driver import PROFILE, DriverError

_NOT_SUPPORTED, _NOT_FOUND = 3, 6
_TEXT_BYTES = 96


@dataclass(frozen=True, slots=True)
class CutGpu:
    """A GPU in MIG mode; `instances` are those that can be computed on, each its id and its profile, such as ``3g.20gb``."""

    id: str
    name: str
    instances: tuple[tuple[str, str], ...]


def cut_gpus(library: str = "libnvidia-ml.so.1") -> tuple[CutGpu, ...]:
    """All GPUs in MIG mode. Raises OSError where there is no NVML, DriverError where it does not answer."""
    nvml = _Nvml(library)
    try:
        return tuple(cut for index in range(nvml.number("nvmlDeviceGetCount_v2")) if (cut := _cut(nvml, index)) is not None)
    finally:
        nvml.call("nvmlShutdown")


def _cut(nvml: _Nvml, index: int) -> CutGpu | None:
    gpu = nvml.handle("nvmlDeviceGetHandleByIndex_v2", index)
    mode, pending = ctypes.c_uint(), ctypes.c_uint()
    nvml.call("nvmlDeviceGetMigMode", gpu, ctypes.byref(mode), ctypes.byref(pending), allowed=_NOT_SUPPORTED)
    if not mode.value:
        return None
    instances = []
    for place in range(nvml.number("nvmlDeviceGetMaxMigDeviceCount", gpu)):
        part = nvml.handle("nvmlDeviceGetMigDeviceHandleByIndex", gpu, place, allowed=_NOT_FOUND)
        if part.value:
            name = nvml.text("nvmlDeviceGetName", part)
            instances.append((nvml.text("nvmlDeviceGetUUID", part), name.partition(PROFILE)[2]))
    return CutGpu(nvml.text("nvmlDeviceGetUUID", gpu), nvml.text("nvmlDeviceGetName", gpu), tuple(instances))


class _Nvml:
    """The library, initialised."""

    def __init__(self, library: str) -> None:
        self._library = ctypes.CDLL(library)
        self.call("nvmlInit_v2")

    def call(self, name: str, *arguments: object, allowed: int = 0) -> None:
        """Raises DriverError for a status that is neither 0 nor the one allowed, and where the function is missing."""
        function = getattr(self._library, name, None)
        if function is None:
            raise DriverError(f"{name} is missing in NVML")
        status = int(function(*arguments))
        if status not in (0, allowed):
            raise DriverError(f"{name}: status {status}")

    def number(self, name: str, *arguments: object) -> int:
        value = ctypes.c_uint()
        self.call(name, *arguments, ctypes.byref(value))
        return value.value

    def handle(self, name: str, *arguments: object, allowed: int = 0) -> ctypes.c_void_p:
        value = ctypes.c_void_p()
        self.call(name, *arguments, ctypes.byref(value), allowed=allowed)
        return value

    def text(self, name: str, handle: ctypes.c_void_p) -> str:
        value = ctypes.create_string_buffer(_TEXT_BYTES)
        self.call(name, handle, value, _TEXT_BYTES)
        return value.value.decode(errors="replace")
