"""Tensor maps of more than two dimensions: boxes of 16-bit numbers that bulk tensor copies bring to shared memory.

CUDA driver API, "Tensor Map Object Management".
"""

from __future__ import annotations

import ctypes
from functools import cache

from vllm_cuda.driver import Driver
from vllm_cuda.launch import TensorMap

_FLOAT16, _BFLOAT16, _NO_INTERLEAVE, _SWIZZLE_128B, _PROMOTE_256B, _FILL_WITH_ZERO = 6, 9, 0, 3, 3, 0


@cache
def _driver() -> Driver:
    return Driver()


def box_map(address: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], *, half: bool) -> TensorMap:
    """Map of a tensor of bfloat16, or float16, whose dimensions are given from the innermost, which has stride 1, on.

    ``strides`` in elements, of all others. A box's rows are of 128 bytes, and swizzled; what lies outside of the tensor is read
    as zero. Raises DriverError where address or strides are no multiples of 16 bytes.
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
