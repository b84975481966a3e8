"""The library's KV layout, asked of the library itself. Imports no torch: planning asks before a device is opened."""

from __future__ import annotations

import ctypes
from types import MappingProxyType

from vllm_core.api import KVGroupSpec, KVLayout, UnsupportedError
from vllm_cpu.native import load

KV_DTYPES = MappingProxyType({"float32": 0, "bfloat16": 1, "float16": 2, "int8": 16, "fp8": 17, "fp8_e4m3": 17, "fp8_e5m2": 18})
"""`enum vllm_dtype` and `enum vllm_kv_dtype` by the names that plans use."""


class CKV(ctypes.Structure):
    """`vllm_kv` of ops.h."""

    _fields_ = [
        ("blocks", ctypes.c_void_p),
        ("num_blocks", ctypes.c_int64),
        ("block_bytes", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("head_size", ctypes.c_int64),
        ("tokens_per_block", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
    ]


def kv_layout(group: KVGroupSpec, dtype: str, tokens_per_block: int) -> KVLayout:
    """What the library needs for a block of one layer. Raises UnsupportedError for a dtype that it does not keep."""
    library = load().library
    assert library is not None, "offered without a library"
    kv = CKV(num_heads=group.num_kv_heads, head_size=group.head_size, tokens_per_block=tokens_per_block)
    kv.dtype = KV_DTYPES.get(dtype, -1)
    status = library.vllm_kv_layout(ctypes.byref(kv))
    if status:
        raise UnsupportedError(
            "KV dtype is not offered",
            on=f"vllm-cpu-native, {dtype}",
            found=f"status {status} of vllm_kv_layout",
            expected=", ".join(KV_DTYPES),
            fix="choose another --kv-cache-dtype",
        )
    return KVLayout(layout_id="vllm-cpu-native", dtype=dtype, tokens_per_block=tokens_per_block, block_bytes=kv.block_bytes)
