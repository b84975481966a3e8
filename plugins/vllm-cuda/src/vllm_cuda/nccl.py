"""NCCL through ctypes, on the stream that is current: nothing is queued elsewhere, no thread watches, a graph can capture it.

NCCL user guide, "NCCL API". The library is the one that torch's CUDA build has loaded.
"""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from typing import Any

import torch
from torch import Tensor

LIBRARY = "libnccl.so.2"
ID_BYTES = 128
_SUM = 0
_TYPES = {torch.float32: 7, torch.bfloat16: 9, torch.float16: 6}


class NcclError(RuntimeError):
    """A call failed; the text says which and how."""


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * ID_BYTES),)


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(LIBRARY)
    library.ncclGetErrorString.restype = ctypes.c_char_p
    library.ncclGetLastError.restype = ctypes.c_char_p
    return library


def _call(name: str, *arguments: Any) -> None:
    status = getattr(_library(), name)(*arguments)
    if status:
        said = (_library().ncclGetErrorString(status), _library().ncclGetLastError(None))
        text = ": ".join(one.decode(errors="replace") for one in said if one)
        raise NcclError(f"{name}: {text} ({status})")


def version() -> str:
    """Such as ``2.28.9``."""
    value = ctypes.c_int()
    _call("ncclGetVersion", ctypes.byref(value))
    major, rest = divmod(value.value, 10000)
    return f"{major}.{rest // 100}.{rest % 100}"


def new_id() -> bytes:
    """The name of a new group, made by one of its ranks for all."""
    unique = _UniqueId()
    _call("ncclGetUniqueId", ctypes.byref(unique))
    return ctypes.string_at(ctypes.byref(unique), ID_BYTES)


class Group:
    """One rank's end of a group. Tensors are contiguous, on the device that was current when the group was made."""

    def __init__(self, rank: int, world_size: int, group_id: bytes) -> None:
        unique = _UniqueId()
        ctypes.memmove(ctypes.byref(unique), group_id, ID_BYTES)
        self._handle = ctypes.c_void_p()
        _call("ncclCommInitRank", ctypes.byref(self._handle), world_size, unique, rank)
        self.rank, self.world_size = rank, world_size

    def all_reduce(self, x: Tensor) -> None:
        """``x`` = sum over ranks."""
        at = ctypes.c_void_p(x.data_ptr())
        _call("ncclAllReduce", at, at, ctypes.c_size_t(x.numel()), _TYPES[x.dtype], _SUM, self._handle, _stream())

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        """``out[W, ...]`` = every rank's ``x``."""
        source, target = ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(out.data_ptr())
        _call("ncclAllGather", source, target, ctypes.c_size_t(x.numel()), _TYPES[x.dtype], self._handle, _stream())

    def reduce_scatter(self, out: Tensor, x: Tensor) -> None:
        """``out`` = this rank's part of the sum of ``x[W * len(out), ...]``."""
        source, target = ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(out.data_ptr())
        _call("ncclReduceScatter", source, target, ctypes.c_size_t(out.numel()), _TYPES[x.dtype], _SUM, self._handle, _stream())

    def abort(self) -> None:
        """End what is running, without waiting for the other ranks; a second call does nothing.

        NCCL gives its memory back once the last graph that holds its work is gone, and waits for that: in a thread, since
        whoever calls may be who keeps the graphs.
        """
        if self._handle:
            handle, self._handle = self._handle, ctypes.c_void_p()
            threading.Thread(target=_library().ncclCommAbort, args=(handle,), name="nccl-abort", daemon=True).start()


def _stream() -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
