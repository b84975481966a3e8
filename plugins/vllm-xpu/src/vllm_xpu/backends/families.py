"""Architecture families: names, devices, limits and tuning. Plain data; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_triton.tried import NUMBERS, PLAIN, Reach, Tried
from vllm_triton.tuning import Tuning
from vllm_xpu.backends import xe2, xe_hpc, xe_hpg

TRIED = Tried(codes=Reach(largest_head=64), caches=dict.fromkeys(NUMBERS, Reach(largest_head=128)), formats=PLAIN)
"""On pvc, by Intel's offline compiler (`vllm_xpu.machine_code`). Of heads of 256 a prompt's attention spills 1,286 registers of
64 bytes, a decode step's 498: they move more memory than the cache has. Of 128 it is 90 and 36, in the best tiles found.
"""

TRIED_HPG = Tried(
    kv_dtypes=NUMBERS,
    caches=dict.fromkeys(NUMBERS, Reach(largest_head=64)),
    formats=PLAIN,
    why="registers of attention spill, by Intel's offline compiler",
)
"""On dg2. Of heads of 96 a prompt's attention spills 2,474 registers in the same tiles, of heads of 128 about as many."""

UNTRIED = Tried(kv_dtypes=NUMBERS, formats=PLAIN, why="no compiler that tells what spills on this architecture was at hand")


@dataclass(frozen=True, slots=True)
class Family:
    """One generation. `slm_bytes` is the most shared local memory of a work-group, `lanes` those of a matrix instruction.

    oneAPI GPU Optimization Guide, "Intel Xe GPU Architecture".
    """

    architectures: tuple[str, ...]
    slm_bytes: int
    lanes: int
    block_loads: bool
    tuning: Tuning
    tried: Tried


XE_HPC = Family(("pvc",), 128 << 10, 16, True, xe_hpc.TUNING, TRIED)
XE_HPG = Family(("dg2",), 64 << 10, 8, False, xe_hpg.TUNING, TRIED_HPG)
XE2 = Family(("bmg", "lnl"), 128 << 10, 16, True, xe2.TUNING, UNTRIED)

FAMILIES = (XE_HPC, XE_HPG, XE2)
ARCHITECTURES = tuple(name for family in FAMILIES for name in family.architectures)

# PCI device ids (Linux kernel, include/drm/intel/pciids.h), first and last of each range.
_DEVICES = (
    (0x0BD0, 0x0BDB, "pvc"),
    (0x0B69, 0x0B6E, "pvc"),
    (0x5690, 0x5697, "dg2"),
    (0x56A0, 0x56A6, "dg2"),
    (0x56B0, 0x56B3, "dg2"),
    (0x56BA, 0x56BD, "dg2"),
    (0x56C0, 0x56C2, "dg2"),
    (0xE202, 0xE223, "bmg"),
    (0x6420, 0x6420, "lnl"),
    (0x64A0, 0x64B0, "lnl"),
)
INTEGRATED = frozenset({"lnl"})
"""Architectures that exist as a part of a processor alone."""


def architecture_of(device_id: int) -> str:
    """``pvc``, ``dg2``, ...; the id in hexadecimal where it is none of them."""
    return next((name for first, last, name in _DEVICES if first <= device_id <= last), f"{device_id:#06x}")


def family_of(architecture: str) -> Family | None:
    """The family of an architecture such as ``pvc``; None where no kernel was tuned for it."""
    return next((family for family in FAMILIES if architecture in family.architectures), None)
