"""A GPU that is not there: facts, a driver that answers from a table, and kernels in Triton's interpreter."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import pytest
from triton import knobs

from vllm_core.api import DeviceFacts
from vllm_cuda import nvrtc
from vllm_cuda.driver import Gpu


def gpu(capability: tuple[int, int] = (9, 0), name: str = "NVIDIA H200") -> Gpu:
    return Gpu(
        index=0,
        id="GPU-394d5c4c-e2e3-22c8-1858-a900fe08625e",
        name=name,
        capability=capability,
        memory_bytes=150109880320,
        integrated=False,
        multiprocessors=132,
        l2_bytes=62914560,
        shared_bytes=232448,
    )


@dataclass
class FakeDriver:
    supports: tuple[int, int]
    found: tuple[Gpu, ...]

    def version(self) -> tuple[int, int]:
        return self.supports

    def gpus(self) -> tuple[Gpu, ...]:
        return self.found


@pytest.fixture
def make_gpu():
    return gpu


@pytest.fixture
def make_driver():
    return FakeDriver


@pytest.fixture
def make_facts():
    def make(architecture: str = "sm_90") -> DeviceFacts:
        return DeviceFacts(
            id="GPU-0",
            name="a GPU",
            device_type="cuda",
            architecture=architecture,
            memory_kind="discrete",
            memory_bytes=80 << 30,
            properties={"index": "0", "multiprocessors": "132"},
        )

    return make


MachineCode = Callable[[bytes, int], str]


@pytest.fixture
def machine_code(tmp_path: Path) -> MachineCode:
    """Instructions of a binary that spills nothing and one of whose programs, of so many threads, fits a multiprocessor."""
    if not nvrtc.installed():
        pytest.skip("needs NVRTC: pip install nvidia-cuda-nvrtc")

    def dump(file: Path, option: str) -> str:
        command = [knobs.nvidia.cuobjdump.path, option, str(file)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def machine_code(binary: bytes, threads: int) -> str:
        file = tmp_path / "kernel.cubin"
        file.write_bytes(binary)
        found = re.search(r"REG:(\d+) STACK:(\d+)", dump(file, "--dump-resource-usage"))
        assert found is not None
        registers, stack = map(int, found.groups())
        assert stack == 0
        assert registers * threads <= 64 << 10
        return dump(file, "--dump-sass")

    return machine_code


Emulate = Callable[..., ctypes.CDLL]


@pytest.fixture(scope="session")
def emulate(tmp_path_factory) -> Emulate:
    """A kernel as the host runs it: ``emulated_{name}.cpp`` around the text of ``files``, in which ``change`` is made.

    Of a program's ``options`` those that define something count. One library of equal arguments is compiled once.
    """
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    folder, built = tmp_path_factory.mktemp("emulated"), {}
    kernels = resources.files("vllm_cuda").joinpath("kernels")

    def emulate(
        name: str, files: Sequence[str], options: Sequence[str], change: tuple[str, str] = ("", ""), level: str = "-O2"
    ) -> ctypes.CDLL:
        number = built.setdefault((name, tuple(files), tuple(options), change, level), len(built))
        text = "\n".join(kernels.joinpath(one).read_text(encoding="utf-8") for one in files)
        assert change[0] in text
        kernel, library = folder / f"kernel{number}.cu", folder / f"kernel{number}.so"
        if not library.exists():
            kernel.write_text(text.replace(*change) if change[0] else text)
            defined = [option for option in options if option.startswith("-D")]
            flags = ["-std=c++17", level, "-w", "-shared", "-fPIC", f'-DKERNEL="{kernel}"', *defined]
            source = Path(__file__).with_name(f"emulated_{name}.cpp")
            subprocess.run([compiler, *flags, str(source), "-o", str(library)], check=True)
        return ctypes.CDLL(str(library))

    return emulate
