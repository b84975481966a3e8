"""Compile what launchers launch, for a chip that is not here, with the specialisations that a launch on it would get.

Triton asks a driver what it compiles for and how a kernel is started; `OfflineDriver` answers in a vendor's place (Triton's
own `driver.set_active`). Compilation is the real one, to machine code; a launch is written down and runs nothing. Tensors
may lie in host memory. One target a process: compilers keep what they compiled, and one that meets an unsupported type may
end the process.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

import vllm_triton.kernels as package
from vllm_triton.versions import numbers

MAX_THREADS = 1 << 16
"""Threads of a program are the compiler's to limit; Triton wants a number."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """One specialisation of a kernel: its name, the compiler's metadata, and its texts and binary by kind."""

    kernel: str
    metadata: Any
    asm: dict[str, Any]

    @property
    def shared_bytes(self) -> int:
        """Memory that the threads of a program share. Over the chip's limit it still compiles: the caller compares."""
        return int(self.metadata.shared)


@dataclass(frozen=True, slots=True)
class Shape:
    """What is kept of a tensor: its sizes, and the bytes of an element."""

    sizes: tuple[int, ...]
    item_bytes: int

    @property
    def num_bytes(self) -> int:
        """All elements'."""
        return math.prod(self.sizes) * self.item_bytes


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch that was asked for: which kernel, which of its specialisations, how many programs, and its arguments.

    Tensors are given by their description `Shape`: launches outlive the tensors.
    """

    kernel: str
    hash: str
    programs: int
    arguments: dict[str, Any]


class _Utilities:
    """What Triton asks of a loaded binary."""

    def __init__(self, shared_bytes: int) -> None:
        self._properties = {"max_shared_mem": shared_bytes, "multiprocessor_count": 1, "warpSize": 1}

    def get_device_properties(self, device: int) -> dict[str, int]:
        return self._properties

    def load_binary(self, name: str, binary: bytes, shared: int, *rest: object) -> tuple[int, ...]:
        """Module, function, registers, spills; and threads, since Triton 3.4."""
        return (1, 1, 0, 0, MAX_THREADS) if numbers(triton.__version__) >= (3, 4) else (1, 1, 0, 0)

    def unload_module(self, module: int) -> None:
        return None


class OfflineDriver:
    """A device that compiles for ``target`` and starts nothing; `launches` in their order."""

    def __init__(self, target: GPUTarget, shared_bytes: int = 1 << 30) -> None:
        self.target = target
        self.utils = _Utilities(shared_bytes)
        self.launches: list[Launch] = []

    def install(self) -> OfflineDriver:
        """Make it Triton's driver in this process."""
        triton.runtime.driver.set_active(self)
        return self

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        return None

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        """A launcher that writes down."""
        name, key, names = source.fn.__name__, str(metadata.hash), source.fn.arg_names

        def launch(x: int, y: int, z: int, *rest: Any) -> None:
            # The kernel's arguments come last, after what the vendor's launcher needs.
            values = (_described(value) for value in rest[-len(names) :])
            self.launches.append(Launch(name, key, x * y * z, dict(zip(names, values, strict=True))))

        return launch


def _described(value: Any) -> Any:
    return Shape(tuple(value.shape), value.element_size()) if hasattr(value, "element_size") else value


def own_kernels() -> Iterator[JITFunction[Any]]:
    """Each kernel of this distribution, and each function that they share."""
    for module in pkgutil.iter_modules(package.__path__):
        for value in vars(importlib.import_module(f"{package.__name__}.{module.name}")).values():
            # Names are imported from module to module; each kernel is looked at where it was written.
            if isinstance(value, JITFunction) and value.fn.__module__.endswith(f".{module.name}"):
                yield value


def compiled() -> Iterator[Compiled]:
    """All that this process has compiled of this distribution's kernels."""
    for kernel in own_kernels():
        for one in kernel.device_caches[0][0].values() if 0 in kernel.device_caches else ():
            yield Compiled(kernel.fn.__name__, one.metadata, dict(one.asm))
