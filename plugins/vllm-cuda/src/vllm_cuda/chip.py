"""Which chip this process computes on, as its kernels in CUDA C++ need to know it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Chip:
    """An architecture such as ``sm_90``, its multiprocessors, and the most shared memory of one program."""

    architecture: str
    multiprocessors: int
    shared_bytes: int


_active: list[Chip] = []


def use(chip: Chip) -> None:
    """Choose the chip of this process."""
    _active[:] = [chip]


def active() -> Chip:
    """The chip of this process; platforms choose it when they start."""
    assert _active, "the platform has not been started"
    return _active[0]


def depends(architecture: str) -> bool:
    """Whether a kernel may start while the one before it drains, and programs may form clusters: since sm_90."""
    return int(architecture.removeprefix("sm_")) >= 90
