"""Kernels in machine code: loaded, and launched with clusters and dependent launch, through the driver.

CUDA driver API, "Module Management", "Execution Control" and "Tensor Map Object Management".
"""

from __future__ import annotations

import ctypes
import struct
from functools import cache
from typing import Any

from triton import runtime

from vllm_cuda.driver import Driver

_MAX_DYNAMIC_SHARED, _SHARED_CARVEOUT, _ALL = 8, 9, 100
_COOPERATIVE, _CLUSTER_DIMENSION, _PROGRAMMATIC_STREAM_SERIALIZATION = 2, 4, 6
_FLOAT16, _BFLOAT16 = 6, 9
_NO_INTERLEAVE, _SWIZZLE_128B, _PROMOTE_256B, _FILL_WITH_ZERO = 0, 3, 3, 0


class TensorMap(ctypes.Structure):
    """How a bulk tensor copy finds the elements of a tensor; opaque, passed to a kernel by value."""

    _fields_ = (("opaque", ctypes.c_uint64 * 16),)


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


@cache
def _driver() -> Driver:
    return Driver()


def stream_of(device: int) -> int:
    """PyTorch's current stream there. An object for it, as `torch.cuda` makes one, takes longer than the launch."""
    return int(runtime.driver.active.get_current_stream(device))


def tensor_map(
    address: int, rows: int, columns: int, stride: int, box_rows: int, box_columns: int, *, half: bool = False
) -> TensorMap:
    """Map of a bfloat16 matrix [rows, columns], whose rows lie ``stride`` elements apart, in boxes that are swizzled.

    ``half``: it is float16.

    A box's row is at most 128 bytes. What lies outside of the matrix is read as zero. Raises DriverError where address or
    stride is no multiple of 16 bytes.
    """
    return box_map(address, (columns, rows), (stride,), (box_columns, box_rows), half=half)


def box_map(address: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], *, half: bool) -> TensorMap:
    """Map of a tensor of bfloat16, or float16, whose dimensions are given from the innermost, which has stride 1, on.

    ``strides`` in elements, of all others. A box's rows are of at most 128 bytes, and swizzled; what lies outside of the tensor
    is read as zero. Raises DriverError where address or strides are no multiples of 16 bytes.
    """
    rank = len(sizes)
    # The driver wants it at a multiple of 64 bytes.
    memory = (ctypes.c_uint64 * 24)()
    aligned = TensorMap.from_buffer(memory, -ctypes.addressof(memory) % 64)
    _driver().call(
        "cuTensorMapEncodeTiled",
        ctypes.byref(aligned),
        ctypes.c_int(_FLOAT16 if half else _BFLOAT16),
        ctypes.c_uint(rank),
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * (rank - 1))(*(stride * 2 for stride in strides)),
        (ctypes.c_uint * rank)(*box),
        (ctypes.c_uint * rank)(*(1 for _ in box)),
        ctypes.c_int(_NO_INTERLEAVE),
        ctypes.c_int(_SWIZZLE_128B),
        ctypes.c_int(_PROMOTE_256B),
        ctypes.c_int(_FILL_WITH_ZERO),
    )
    return aligned


@cache
def _dependent(cluster: int) -> Any:
    attributes = (_Attribute * 2)()
    attributes[0].id, attributes[0].value[0] = _PROGRAMMATIC_STREAM_SERIALIZATION, 1
    attributes[1].id, attributes[1].value[:3] = _CLUSTER_DIMENSION, (cluster, 1, 1)
    return attributes


@cache
def _together() -> Any:
    attributes = (_Attribute * 1)()
    attributes[0].id, attributes[0].value[0] = _COOPERATIVE, 1
    return attributes


class Kernel:
    """A function of a binary, on the device whose context is current. Raises DriverError where it cannot be loaded."""

    def __init__(self, binary: bytes, name: str, shared_bytes: int) -> None:
        driver, module, function = _driver(), ctypes.c_void_p(), ctypes.c_void_p()
        driver.call("cuModuleLoadData", ctypes.byref(module), binary)
        driver.call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        driver.call("cuFuncSetAttribute", function, ctypes.c_int(_MAX_DYNAMIC_SHARED), ctypes.c_int(shared_bytes))
        # Else the driver sets aside what one program needs, and the next kernel's finds no room beside it.
        driver.call("cuFuncSetAttribute", function, ctypes.c_int(_SHARED_CARVEOUT), ctypes.c_int(_ALL))
        self._function, self._shared_bytes = function, shared_bytes
        self._configs: dict[tuple[int, int, int, int, bool, bool], _Config] = {}
        self._launch = driver.function("cuLaunchKernelEx")

    def launch(
        self,
        programs: int,
        threads: int,
        cluster: int,
        stream: int,
        *arguments: ctypes.Structure | ctypes._SimpleCData[Any],
        dependent: bool = True,
        together: bool = False,
    ) -> None:
        """Queue ``programs`` programs, ``cluster`` of them together.

        ``dependent``: they may start while the kernel before drains. Chips before sm_90 have neither this nor clusters.
        ``together``: all run at once, without clusters, or none does; then they may wait for one another.
        """
        key = (programs, threads, cluster, stream, dependent, together)
        config = self._configs.get(key)
        if config is None:
            config = self._configs[key] = self._config(*key)
        # As bytes: a new array's type costs more than the launch.
        addresses = struct.pack(f"{len(arguments)}P", *map(ctypes.addressof, arguments))
        status = self._launch(ctypes.byref(config), self._function, addresses, None)
        if status:
            raise _driver().error("cuLaunchKernelEx", status)

    def _config(self, programs: int, threads: int, cluster: int, stream: int, dependent: bool, together: bool) -> _Config:
        attributes = _together() if together else _dependent(cluster) if dependent else ()
        pointer = attributes or None
        return _Config((programs, 1, 1), (threads, 1, 1), self._shared_bytes, stream, pointer, len(attributes))
