"""Native libraries of the C ABI `vllm/ops.h`: which were tried, which was loaded, what it has. Imports no torch.

`VLLM_CORE_OPS_PATH` comes first and its failure is an error; then the library that was built with this package, which is not
there where no compiler was. Without a library the package runs on its other kernels and core's references.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from vllm_core.api import UnsupportedError

ABI_VERSION = 3
VARIABLE = "VLLM_CORE_OPS_PATH"
LIBRARY = "libvllm_cpu_ops.so"
REPLAY = "vllm_ops_replay"
"""Not of the ABI: whoever lacks it has recorded calls made one by one."""
ELF = re.compile(rb"\x7fELF.{14}(..)", re.DOTALL)
"""The machine that a file is for, as ELF headers name it."""


class CMatrix(ctypes.Structure):
    """`vllm_matrix` of ops.h."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("zero", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("row_bytes", ctypes.c_int64),
        ("format", ctypes.c_int32),
        ("group", ctypes.c_int32),
    ]


class CLinearCall(ctypes.Structure):
    """`vllm_linear_call` of ops.h."""

    _fields_ = [
        ("parts", ctypes.POINTER(CMatrix)),
        ("num_parts", ctypes.c_int64),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("bias", ctypes.c_void_p),
        ("norm", ctypes.c_void_p),
        ("eps", ctypes.c_double),
        ("norm_dtype", ctypes.c_int32),
        ("gate", ctypes.c_int32),
        ("add", ctypes.c_int32),
        ("activation", ctypes.c_int32),
        ("x_dtype", ctypes.c_int32),
        ("out_dtype", ctypes.c_int32),
    ]


class CRecordedCall(ctypes.Structure):
    """A recorded call of native/replay.cpp."""

    _fields_ = [("function", ctypes.c_void_p), ("arguments", ctypes.c_void_p), ("kind", ctypes.c_int64)]


@dataclass(frozen=True, slots=True)
class Tried:
    """One step of the chain."""

    path: str
    outcome: str


@dataclass(frozen=True, slots=True)
class Native:
    """The library, if there is one, with the ops that it has and its kernels' name; and every path that was tried."""

    library: ctypes.CDLL | None
    tried: tuple[Tried, ...]
    ops: frozenset[str] = frozenset()
    variant: str = ""

    def __str__(self) -> str:
        return "; ".join(f"{step.path}: {step.outcome}" for step in self.tried)


def packaged() -> Path:
    """Where the library that was built with this package lies, or would lie: an editable install keeps it elsewhere."""
    folders = getattr(sys.modules.get(__package__ or ""), "__path__", [])
    places = [Path(__file__).with_name(LIBRARY), *(Path(folder) / LIBRARY for folder in folders)]
    return next((place for place in places if place.exists()), places[0])


def load() -> Native:
    """What this process uses. Raises UnsupportedError where the user's library cannot be used."""
    return _found(os.environ.get(VARIABLE, ""))


@cache
def _found(given: str) -> Native:
    return find({VARIABLE: given})


def find(environ: Mapping[str, str] = os.environ) -> Native:
    """Walk the chain. Raises UnsupportedError where the user's library cannot be used."""
    if given := environ.get(VARIABLE):
        found = _load(Path(given))
        if isinstance(found, str):
            raise UnsupportedError(
                "Native op library cannot be used",
                on=f"{VARIABLE}={given}",
                found=found,
                expected=f"a library of vllm/ops.h, ABI version {ABI_VERSION}",
                fix=f"rebuild it against core's ops.h, or unset {VARIABLE}",
            )
        return found
    path = packaged()
    if not path.exists():
        return Native(None, (Tried(str(path), "no native library in this build: no C++ compiler when it was installed"),))
    found = _load(path)
    return Native(None, (Tried(str(path), found),)) if isinstance(found, str) else found


def _load(path: Path) -> Native | str:
    """The library, checked, or why it cannot be used."""
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return _cause(path, error)
    kinds = {"vllm_ops_abi_version": ctypes.c_uint32, "vllm_ops_abi_size": ctypes.c_uint64, "vllm_ops_list": ctypes.c_char_p}
    for name, kind in kinds.items():
        if not hasattr(library, name):
            return f"no symbol {name}"
        getattr(library, name).restype = kind
    version, size = library.vllm_ops_abi_version(), library.vllm_ops_abi_size()
    expected = ctypes.sizeof(CLinearCall)
    if (version, size) != (ABI_VERSION, expected):
        return f"ABI version {version} with calls of {size} bytes, not {ABI_VERSION} with {expected}"
    ops = library.vllm_ops_list().decode().split()
    missing = [f"vllm_{name}" for name in ops if not hasattr(library, f"vllm_{name}")]
    if missing:
        return f"missing symbols: {', '.join(missing)}"
    variant = ""
    if hasattr(library, "vllm_ops_variant"):
        library.vllm_ops_variant.restype = ctypes.c_char_p
        variant = library.vllm_ops_variant().decode()
    outcome = f"loaded, {variant or 'unnamed'} kernels of {len(ops)} ops"
    return Native(library, (Tried(str(path), outcome),), frozenset(ops), variant)


def _cause(path: Path, error: OSError) -> str:
    """Why a file is no library; the system calls one for another machine a file that does not exist."""
    if path.is_file():
        theirs, ours = ELF.match(path.read_bytes()[:20]), ELF.match(Path(sys.executable).read_bytes()[:20])
        if theirs and ours and theirs[1] != ours[1]:
            kinds = (int.from_bytes(one[1], sys.byteorder) for one in (theirs, ours))
            return "built for another machine: ELF machine {}, this is {}".format(*kinds)
    return str(error)


@cache
def replayer() -> Callable[..., int] | None:
    """What makes recorded calls one after the other: of the loaded library, or of the package's where that has none.

    Takes the address of an array of `CRecordedCall`, their number, and the address of an int32, the status of the call that
    failed. Returns how many were made. None where neither library has it.
    """
    library = load().library
    if library is None or not hasattr(library, REPLAY):
        packed = packaged()
        found = _load(packed) if packed.exists() else ""
        library = None if isinstance(found, str) else found.library
    if library is None or not hasattr(library, REPLAY):
        return None
    kinds = ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p
    function: Callable[..., int] = ctypes.CFUNCTYPE(*kinds)((REPLAY, library))
    return function


def set_threads(count: int) -> None:
    """Let the library use this many threads, the caller's included; nothing where there is no library."""
    library = load().library
    if library is not None and hasattr(library, "vllm_ops_set_threads"):
        library.vllm_ops_set_threads(ctypes.c_int64(count))
