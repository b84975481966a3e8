"""CUDA C++ compiled at start by NVRTC, which every CUDA build of torch brings along; binaries are kept in Triton's cache.

NVRTC reference, sections "Compilation" and "Error Handling". No GPU is needed to compile.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

SONAMES = ("libnvrtc.so.13", "libnvrtc.so.12")
_BINARY = "kernel.cubin"


class CompileError(Exception):
    """The compiler refused the source; the text is its log."""


def compiled(source: str, options: Sequence[str]) -> bytes:
    """The binary (cubin) of ``source``. Raises OSError where there is no NVRTC, CompileError where it refuses."""
    from triton.runtime.cache import get_cache_manager

    library = nvrtc()
    key = hashlib.sha256("\0".join([_version(library), *options, source]).encode()).hexdigest()
    manager = get_cache_manager(key)
    found = manager.get_file(_BINARY)
    if found is not None:
        return Path(found).read_bytes()
    binary = _compile(library, source, options)
    manager.put(binary, _BINARY, binary=True)
    return binary


def installed() -> bool:
    """Whether there is an NVRTC. One of NVIDIA's packages is not loaded to answer."""
    if any(_packaged()):
        return True
    try:
        nvrtc()
    except OSError:
        return False
    return True


@cache
def nvrtc() -> ctypes.CDLL:
    """The library: of NVIDIA's packages, or as the linker finds it. Raises OSError."""
    errors = []
    for candidate in (*_packaged(), *map(Path, SONAMES)):
        try:
            for builtins in sorted(candidate.parent.glob("libnvrtc-builtins.so.*")):
                # NVRTC asks for this one by its bare name, and does not look beside itself.
                ctypes.CDLL(str(builtins))
            return ctypes.CDLL(str(candidate))
        except OSError as error:
            errors.append(str(error))
    raise OSError(f"no NVRTC: {'; '.join(errors)}")


def _packaged() -> Iterator[Path]:
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for name in SONAMES:
            yield from sorted(Path(folder).glob(f"*/lib/{name}"))


def _version(library: ctypes.CDLL) -> str:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(library, library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return f"{major.value}.{minor.value}"


def _compile(library: ctypes.CDLL, source: str, options: Sequence[str]) -> bytes:
    program = ctypes.c_void_p()
    _check(library, library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None))
    try:
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if library.nvrtcCompileProgram(program, len(options), given):
            raise CompileError(_bytes(library, program, "ProgramLog").rstrip(b"\0").decode(errors="replace"))
        return _bytes(library, program, "CUBIN")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _bytes(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _check(library, library[f"nvrtcGet{what}Size"](program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(library, library[f"nvrtcGet{what}"](program, buffer))
    return buffer.raw


def _check(library: ctypes.CDLL, status: int) -> None:
    if status:
        text = library.nvrtcGetErrorString
        text.restype = ctypes.c_char_p
        raise CompileError(text(status).decode())
