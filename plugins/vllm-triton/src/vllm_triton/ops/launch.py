"""What launchers share: kernels that are started without asking again what is known, sizes, and memory kept between calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel

from vllm_triton.tuning import Tuning, active

MOST_SETTLED = 4096
"""Answers that a settled question keeps; each is some hundred bytes of host memory."""

_ALIGNED = 16
"""Bytes: Triton compiles a kernel once for pointers at multiples of it and once for others."""

_RANGE = (1 << 31) - 1
"""Bytes of memory up to which Triton's backend for HIP compiles a kernel with offsets of 32 bits."""

_RUNTIME: Any = triton.knobs.runtime if hasattr(triton, "knobs") else SimpleNamespace(jit_cache_hook=None)
"""Where a rehearsal (`vllm_triton.ahead`) hooks in, in versions of Triton that let it."""

Answer = TypeVar("Answer")
Programs = tuple[int, int, int]
"""Of a launch, in each direction."""


def power_of_2(size: int) -> int:
    """The next power of two."""
    return 1 << max(0, size - 1).bit_length()


def filled(count: int) -> int:
    """The next multiple of 4: numbers of 4 bytes or more that come after so many begin at a multiple of 16 bytes.

    Kernels are compiled once for pointers that do and once for those that do not; where all do, steps of every size share one.
    """
    return (count + 3) & ~3


def settled(question: Callable[..., Answer]) -> Callable[..., Answer]:
    """Ask once for each value of the arguments, which are hashable, and again when the tuning in use is another."""
    answers: dict[tuple[Any, ...], Answer] = {}
    tuning: Tuning | None = None

    def answer(*facts: Any) -> Answer:
        nonlocal tuning
        if tuning is not active() or len(answers) > MOST_SETTLED:
            answers.clear()
            tuning = active()
        try:
            return answers[facts]
        except KeyError:
            pass  # asked outside, so that what a question raises has no other error before it
        found = answers[facts] = question(*facts)
        return found

    return answer


class Launch:
    """A kernel with all arguments settled but for the first ones, which are tensors, and with its options.

    At each launch Triton finds out what the kernel has to be compiled for, from every argument and every option. What of this
    may differ between launches of one `Launch` are the tensors' dtypes and where they begin: the rest is found out once.
    Hooks of Triton's that look on at launches do not see those after the first of a kind.
    """

    __slots__ = ("_compiled", "_kernel", "_settled", "_sized")

    def __init__(self, kernel: Any, **settled: float | str) -> None:
        self._kernel, self._settled = kernel, settled
        self._compiled: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self._sized = False

    def start(self, programs: Programs, *tensors: Tensor) -> None:
        """Queue it on the current stream. ``tensors`` are the kernel's first arguments."""
        addresses = [tensor.data_ptr() for tensor in tensors]
        device = tensors[0].get_device()
        kind = (device, *[tensor.dtype for tensor in tensors])
        if self._sized or reduce(or_, addresses) % _ALIGNED:
            kind += self._apart(tensors, addresses)
        found = self._compiled.get(kind)
        if found is None or _RUNTIME.jit_cache_hook is not None:
            self._ask(programs, tensors, kind)
            return
        compiled, run, stream_of, rest = found
        run(*programs, stream_of(device), compiled.function, compiled.packed_metadata, None, None, None, *addresses, *rest)

    def _apart(self, tensors: Sequence[Tensor], addresses: Sequence[int]) -> tuple[bool, ...]:
        """What else the kernel is compiled for apart."""
        aligned = tuple(address % _ALIGNED == 0 for address in addresses)
        if not self._sized:
            return aligned
        return *aligned, *(tensor.untyped_storage().nbytes() <= _RANGE for tensor in tensors)

    def _ask(self, programs: Programs, tensors: Sequence[Tensor], kind: tuple[Any, ...]) -> None:
        """Launch it as Triton does, and keep what was compiled where a device runs it."""
        compiled = self._kernel[programs](*tensors, **self._settled)
        if kind[0] < 0 or not isinstance(compiled, CompiledKernel):
            return
        driver = triton.runtime.driver.active
        if not self._sized and driver.get_current_target().backend == "hip":
            self._sized = True  # from here on; the next launch is asked for once more
            return
        rest = [self._settled[name] for name in self._kernel.arg_names[len(tensors) :]]
        self._compiled[kind] = (compiled, compiled.run, driver.get_current_stream, rest)


class Scratch:
    """Memory of a fixed size per device, made once and never moved: captured steps keep its address."""

    def __init__(self, num_bytes: int, *, zero: bool = False, dtype: torch.dtype = torch.uint8) -> None:
        self._count, self._dtype = num_bytes // dtype.itemsize, dtype
        self._make = torch.zeros if zero else torch.empty
        self._made: dict[torch.device, Tensor] = {}

    def get(self, device: torch.device) -> Tensor:
        """``num_bytes`` of numbers of ``dtype`` on ``device``."""
        found = self._made.get(device)
        if found is None:
            found = self._made[device] = self._make(self._count, dtype=self._dtype, device=device)
        return found
