"""Architecture families: names, limits, fp8 and tuning. Plain data; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from vllm_rocm.backends import cdna2, cdna3, cdna4, rdna3, rdna4
from vllm_triton.offers import LINEAR_FORMATS
from vllm_triton.tried import Reach, Tried
from vllm_triton.tuning import Tuning

Fp8 = Literal["fnuz", "ocp", "none"]
"""Which 8-bit floating point the matrix units take: AMD's own without a negative zero, or that of the OCP specification."""


TRIED = Tried(codes=Reach(smallest_block=16), formats=LINEAR_FORMATS - {"int4_group", "q8_0", "q4_0"})
"""What spills no register on CDNA (`vllm_rocm.machine_code`): masks of smaller blocks, and groups of four bits, take scalar
ones too many. ggml's blocks of 32 do not, but a step of one row is predicted to be five to nine times slower with them than in
bfloat16.
"""

HALVES = frozenset({"bfloat16", "float16"})
TRIED_RDNA4 = Tried(codes=Reach(smallest_block=16), dtypes=HALVES, caches={"float32": Reach(largest_head=64)})
"""The same on RDNA, whose lanes have half as many, and float32 no matrix unit."""

TRIED_RDNA3 = replace(
    TRIED_RDNA4,
    codes=Reach(smallest_block=16, largest_head=64),
    caches={**TRIED_RDNA4.caches, **dict.fromkeys(HALVES, Reach(largest_head=128))},
)
"""Its matrix unit takes operands that both halves of a wave hold: queries and keys of 256 numbers fill all registers, and so do
those of 128 with the widening of codes, where many heads share one or a mask lies over them.
"""


@dataclass(frozen=True, slots=True)
class Family:
    """One generation. A unit is what torch counts as a multiprocessor: a compute unit of CDNA, two of RDNA; 4 SIMDs each.

    `wave_size` lanes of a wave; `lds_bytes` the most local data share of one workgroup, `unit_lds_bytes` that of a unit;
    `registers` the vector registers that a lane may name, accumulators included; `register_file` those of one SIMD by lane,
    which its waves divide; `max_waves` waves of a SIMD (AMD's instruction set architecture guides, and the hardware
    specification tables of ROCm). `tried`: which forms of caches and weights its compiler makes kernels of that spill nothing.
    """

    architectures: tuple[str, ...]
    wave_size: int
    lds_bytes: int
    unit_lds_bytes: int
    registers: int
    register_file: int
    max_waves: int
    fp8: Fp8
    tuning: Tuning
    tried: Tried = TRIED


CDNA2 = Family(("gfx90a",), 64, 64 << 10, 64 << 10, 512, 512, 8, "none", cdna2.TUNING)
CDNA3 = Family(("gfx942",), 64, 64 << 10, 64 << 10, 512, 512, 8, "fnuz", cdna3.TUNING)
CDNA4 = Family(("gfx950",), 64, 160 << 10, 160 << 10, 512, 512, 8, "ocp", cdna4.TUNING)
RDNA3 = Family(("gfx1100",), 32, 64 << 10, 128 << 10, 256, 1536, 16, "none", rdna3.TUNING, TRIED_RDNA3)
RDNA4 = Family(("gfx1201",), 32, 64 << 10, 128 << 10, 256, 1536, 16, "ocp", rdna4.TUNING, TRIED_RDNA4)

FAMILIES = (CDNA2, CDNA3, CDNA4, RDNA3, RDNA4)
ARCHITECTURES = tuple(name for family in FAMILIES for name in family.architectures)


def family_of(architecture: str) -> Family | None:
    """The family of an architecture such as ``gfx942``; None where no kernel was tuned for it."""
    return next((family for family in FAMILIES if architecture in family.architectures), None)
