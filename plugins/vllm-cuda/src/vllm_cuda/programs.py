"""Kernels in CUDA C++: compiled once, loaded once a device, and compiled side by side in a rehearsal."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import resources

import torch

from vllm_cuda.launch import Kernel
from vllm_cuda.nvrtc import compiled

log = logging.getLogger(__name__)

COMPILERS = 8
"""Most programs that a rehearsal compiles at once."""

_rehearsed: list[tuple[ThreadPoolExecutor, dict[Program, Future[bytes]]]] = []


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """A function of some files of `kernels`, one after the other, after lines of its own; compiler options; shared memory.

    One object a form of a kernel: it is looked up in every launch, and to compare all of it takes longer.
    """

    function: str
    files: tuple[str, ...]
    options: tuple[str, ...]
    shared_bytes: int
    before: str = ""

    @property
    def source(self) -> str:
        """The text that is compiled."""
        folder = resources.files("vllm_cuda").joinpath("kernels")
        return "\n".join((self.before, *(folder.joinpath(name).read_text(encoding="utf-8") for name in self.files)))

    def binary(self) -> bytes:
        """Raises OSError where there is no compiler, CompileError where it refuses."""
        return compiled(self.source, self.options)


def defined(**values: int) -> tuple[str, ...]:
    """Options that define macros."""
    return tuple(f"-D{name}={int(value)}" for name, value in values.items())


def kernel_of(program: Program, device: int) -> Kernel | None:
    """The kernel to launch on a device; None inside a rehearsal, which launches nothing."""
    if _rehearsed:
        pool, programs = _rehearsed[-1]
        if program not in programs:
            programs[program] = pool.submit(program.binary)
        return None
    return _loaded(program, device)


@cache
def _loaded(program: Program, device: int) -> Kernel:
    with torch.cuda.device(device):
        return Kernel(program.binary(), program.function, program.shared_bytes)


@contextmanager
def rehearsal() -> Iterator[None]:
    """Launch nothing inside; on leaving, what would have been launched is compiled, or fails again where it is launched."""
    programs: dict[Program, Future[bytes]] = {}
    with ThreadPoolExecutor(COMPILERS) as pool:
        _rehearsed.append((pool, programs))
        try:
            yield
        finally:
            _rehearsed.pop()
    for program, future in programs.items():
        error = future.exception()
        if error is not None:
            log.info("not compiled ahead: %s: %s", program, error)
