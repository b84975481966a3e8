"""Native libraries of the C ABI `vllm/ops.h`: which were tried, which was loaded. Imports no torch.

`VLLM_CORE_OPS_PATH` comes first and its failure is an error; then a library packaged beside this module. This
version packages none, and uses of a given library its `vllm_rms_norm`.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_core.api import UnsupportedError

ABI_VERSION = 1
MAX_RANK = 5
VARIABLE = "VLLM_CORE_OPS_PATH"
PACKAGED = Path(__file__).with_name("libvllm_cpu_ops.so")
SYMBOLS = ("vllm_rms_norm", "vllm_linear", "vllm_kv_write", "vllm_paged_attention")


class CTensor(ctypes.Structure):
    """`vllm_tensor` of ops.h."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("sizes", ctypes.c_int64 * MAX_RANK),
        ("strides", ctypes.c_int64 * MAX_RANK),
        ("rank", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
    ]


@dataclass(frozen=True, slots=True)
class Tried:
    """One step of the chain."""

    path: str
    outcome: str


@dataclass(frozen=True, slots=True)
class Native:
    """The library, if there is one, and every path that was tried."""

    library: ctypes.CDLL | None
    tried: tuple[Tried, ...]

    def __str__(self) -> str:
        return "; ".join(f"{step.path}: {step.outcome}" for step in self.tried)


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
        return Native(found, (Tried(given, "loaded"),))
    if not PACKAGED.exists():
        return Native(None, (Tried(str(PACKAGED), "no native library in this build"),))
    found = _load(PACKAGED)
    if isinstance(found, str):
        return Native(None, (Tried(str(PACKAGED), found),))
    return Native(found, (Tried(str(PACKAGED), "loaded"),))


def _load(path: Path) -> ctypes.CDLL | str:
    """The library, checked, or why it cannot be used."""
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return str(error)
    for name, kind in (("vllm_ops_abi_version", ctypes.c_uint32), ("vllm_ops_abi_size", ctypes.c_uint64)):
        if not hasattr(library, name):
            return f"no symbol {name}"
        getattr(library, name).restype = kind
    version, size = library.vllm_ops_abi_version(), library.vllm_ops_abi_size()
    if (version, size) != (ABI_VERSION, ctypes.sizeof(CTensor)):
        return f"ABI version {version} with tensors of {size} bytes, not {ABI_VERSION} with {ctypes.sizeof(CTensor)}"
    missing = [name for name in SYMBOLS if not hasattr(library, name)]
    return f"missing symbols: {', '.join(missing)}" if missing else library
