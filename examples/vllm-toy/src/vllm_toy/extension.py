"""The C++ part: compiled when an engine first needs it, kept in a cache, found by what it was made from."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from pathlib import Path
from types import ModuleType

from vllm_core.api import UnsupportedError

SOURCES = Path(__file__).parent / "csrc"
NEEDED = "install g++ 11 or newer and Python's headers (Debian: apt install g++ python3-dev), or name a compiler with CXX"
FLAGS = ("-O1", "-std=c++17", "-shared", "-fPIC", "-w")
TIME_LIMIT_S = 600


def compiler() -> str | None:
    """Path of the compiler; None without one."""
    return shutil.which(os.environ.get("CXX") or "c++") or shutil.which("g++")


def header() -> Path:
    """Where Python's own header belongs."""
    return Path(sysconfig.get_path("include")) / "Python.h"


def library() -> Path:
    """Where the compiled library is, or will be. Reads the sources; imports no torch."""
    made_of = hashlib.sha256(" ".join(FLAGS).encode())
    for source in sorted(SOURCES.iterdir()):
        made_of.update(source.read_bytes())
    made_of.update(f"{importlib.metadata.version('torch')} {sys.implementation.cache_tag}".encode())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-toy"
    return cache / f"_toy-{made_of.hexdigest()[:16]}.so"


def load() -> ModuleType:
    """Compile the library unless that was done before, and import it. Raises UnsupportedError."""
    found = library()
    found.parent.mkdir(parents=True, exist_ok=True)
    with (found.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # engine processes that start together compile once; ends with the process
        if not found.exists():
            _compile(found)
    loader = ExtensionFileLoader("_toy", str(found))
    module = importlib.util.module_from_spec(ModuleSpec("_toy", loader, origin=str(found)))
    loader.exec_module(module)
    return module


def _compile(target: Path) -> None:
    import torch

    torch_folder = Path(torch.__file__).parent
    with_compiler = compiler()
    if with_compiler is None or not header().exists():
        raise _failed("no compiler" if with_compiler is None else f"{header()} is missing", NEEDED)
    fresh = target.with_suffix(".unfinished")
    command = [with_compiler, *FLAGS, str(SOURCES / "toy.cpp"), "-o", str(fresh)]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
    include = torch_folder / "include"
    command += [f"-I{folder}" for folder in (include, include / "torch" / "csrc" / "api" / "include", header().parent)]
    command += [f"-L{torch_folder / 'lib'}", "-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _failed(str(error), NEEDED) from error
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise _failed("; ".join(errors[:3]), "use the torch that this version of vllm-toy asks for")
    fresh.replace(target)


def _failed(found: str, fix: str) -> UnsupportedError:
    return UnsupportedError(
        "Simulated device cannot be compiled", on=str(SOURCES / "toy.cpp"), found=found, expected="a C++ compiler", fix=fix
    )
