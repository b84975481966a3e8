"""Architecture families: names, limits and tuning. Plain data; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_cuda.backends import ada, ampere, blackwell, hopper
from vllm_triton.tuning import Tuning


@dataclass(frozen=True, slots=True)
class Family:
    """`shared_bytes` is the most shared memory of one program (CUDA C++ Programming Guide, table of compute capabilities).

    `toolkit` is the first version of CUDA whose compilers know such chips (its release notes): what was built with an older
    one, torch say, has no code for them.
    """

    architectures: tuple[str, ...]
    shared_bytes: int
    tuning: Tuning
    toolkit: tuple[int, int]


AMPERE = Family(("sm_80",), 163 << 10, ampere.TUNING, (11, 0))
ADA = Family(("sm_86", "sm_89"), 99 << 10, ada.TUNING, (11, 0))
HOPPER = Family(("sm_90",), 227 << 10, hopper.TUNING, (11, 8))
BLACKWELL = Family(("sm_100", "sm_103"), 227 << 10, blackwell.TUNING, (12, 8))
BLACKWELL_SMALL = Family(("sm_120", "sm_121"), 99 << 10, blackwell.SMALL, (12, 8))

FAMILIES = (AMPERE, ADA, HOPPER, BLACKWELL, BLACKWELL_SMALL)
ARCHITECTURES = tuple(name for family in FAMILIES for name in family.architectures)


def family_of(architecture: str) -> Family | None:
    """The family of an architecture such as ``sm_90``; None where no kernel was tuned for it."""
    return next((family for family in FAMILIES if architecture in family.architectures), None)
