"""The C++ part: compiled when a pose first needs it, kept in a cache, found by what it was made from."""

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

SOURCES = Path(__file__).parent / "csrc"
FLAGS = ("-O1", "-std=c++17", "-shared", "-fPIC", "-w")
TIME_LIMIT_S = 600
KEYS = ("PrivateUse1", "XPU", "CUDA")
"""Keys under which torch can know the device; each is a library of its own."""


def cache_folder() -> Path:
    """Where libraries and generated folders are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-simulator"


def compiler() -> str | None:
    """Path of the compiler; None without one."""
    return shutil.which(os.environ.get("CXX") or "c++") or shutil.which("g++")


def library(key: str) -> Path:
    """Where the compiled library for ``key`` is, or will be. Reads the sources; imports no torch."""
    made_of = hashlib.sha256(" ".join((*FLAGS, key)).encode())
    for source in sorted(SOURCES.iterdir()):
        made_of.update(source.read_bytes())
    made_of.update(f"{importlib.metadata.version('torch')} {sys.implementation.cache_tag}".encode())
    return cache_folder() / f"device-{key}-{made_of.hexdigest()[:16]}.so"


def load(key: str) -> ModuleType:
    """Compile the library unless that was done before, and import it. Raises RuntimeError."""
    import torch  # noqa: F401 - brings the libraries that this one is linked to

    found = library(key)
    found.parent.mkdir(parents=True, exist_ok=True)
    with (found.parent / f"lock-{key}").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # processes that start together compile once; ends with the process
        if not found.exists():
            _compile(key, found)
    name = f"vllm_simulator_{key}"
    loader = ExtensionFileLoader(name, str(found))
    module = importlib.util.module_from_spec(ModuleSpec(name, loader, origin=str(found)))
    loader.exec_module(module)
    return module


def _compile(key: str, target: Path) -> None:
    import torch

    folder = Path(torch.__file__).parent
    with_compiler, header = compiler(), Path(sysconfig.get_path("include")) / "Python.h"
    if with_compiler is None or not header.exists():
        raise RuntimeError("the simulated device needs g++ and Python's headers (Debian: apt install g++ python3-dev)")
    fresh = target.with_suffix(".unfinished")
    command = [with_compiler, *FLAGS, str(SOURCES / "device.cpp"), "-o", str(fresh)]
    command += [
        f"-DTORCH_EXTENSION_NAME=vllm_simulator_{key}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
    ]
    if key != "PrivateUse1":
        command += [f"-DSIM_KEY={key}", f"-DSIM_{key}"]
    include = folder / "include"
    command += [f"-I{one}" for one in (include, include / "torch" / "csrc" / "api" / "include", header.parent)]
    command += [f"-L{folder / 'lib'}", "-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT_S)
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise RuntimeError("the simulated device cannot be compiled: " + "; ".join(errors[:8]))
    fresh.replace(target)
