"""How an op of `vllm/ops.h` is called: its struct is packed into bytes, which is quicker than an argument each, and safe with
several threads, since every call has its own.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vllm_core.api import UnsupportedError
from vllm_cpu import recording
from vllm_cpu.native import load

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""`enum vllm_dtype` of the dtypes of activations."""

KINDS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}
"""`enum vllm_activation_kind`."""

_STATUS = {1: "unsupported", 2: "arguments that contradict each other", 3: "failed"}


def function(name: str) -> Callable[..., None]:
    """The library's ``vllm_<name>``, which takes the bytes of its struct and whatever owns the memory that these name.

    Raises UnsupportedError for a status other than 0, where tensors among the owners tell with what.
    """
    library = load().library
    assert library is not None, f"{name} was offered without a library"
    if not hasattr(library, f"vllm_{name}"):
        return _absent(name)
    native = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_char_p)((f"vllm_{name}", library))

    def call(arguments: bytes, *owners: Any) -> None:
        if status := native(arguments):
            raise refused(name, status, owners)
        if (recorder := recording.now()) is not None:
            failed = partial(refused, name, owners=owners)
            note = recording.NativeCall(name, recording.STRUCT, native, (arguments,), arguments, failed, owners)
            recorder.add(note)

    return call


def _absent(name: str) -> Callable[..., None]:
    """A library may have some ops of a module and not others; those are not offered."""

    def call(arguments: bytes, *owners: Any) -> None:
        raise UnsupportedError(
            "Op is not in the native library",
            on=f"vllm_{name}",
            found="no such symbol",
            expected="an op that the library lists",
            fix="ask for another provider of this op",
        )

    return call


def packer(layout: str) -> Callable[..., bytes]:
    """Packs a struct's fields behind its stream: ``P`` a pointer, ``q`` an int64, ``d`` a double."""
    return struct.Struct(f"P{layout}").pack


def refused(name: str, status: int, owners: Sequence[Any]) -> UnsupportedError:
    """The error of a call that did not return 0."""
    tensors = [one for one in owners if isinstance(one, Tensor)]
    return UnsupportedError(
        "Native op failed",
        on=f"vllm_{name}, {', '.join(f'{tensor.dtype} {tuple(tensor.shape)}' for tensor in tensors)}",
        found=f"status {status}: {_STATUS.get(status, 'unknown')}",
        expected="status 0",
        fix="--deny-provider vllm-cpu-native, and report it to the library's authors",
    )
