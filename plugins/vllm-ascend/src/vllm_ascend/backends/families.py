"""Chip families: their names in the driver's tools, and what their public data sheets say. Plain data; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    """`names` are what `npu-smi info` prints for the family's chips; they begin with one of these.

    Rates of one device as torch sees it (910C: one of the two dies of a package), from public data sheets and papers, cited
    in `docs`: dense float16 products, and the memory's bandwidth.
    """

    architecture: str
    names: tuple[str, ...]
    flops_per_s: float
    bytes_per_s: float
    memory_bytes: int


ATLAS_A2 = Family("910b", ("910B", "Ascend910B"), 313e12, 1.6e12, 64 << 30)
ATLAS_A3 = Family("910c", ("Ascend910", "910_93", "910C"), 376e12, 1.6e12, 64 << 30)

FAMILIES = (ATLAS_A2, ATLAS_A3)
ARCHITECTURES = tuple(family.architecture for family in FAMILIES)


def family_of(architecture: str) -> Family | None:
    """The family of an architecture such as ``910b``; None for another."""
    return next((family for family in FAMILIES if family.architecture == architecture), None)


def family_named(name: str) -> Family | None:
    """The family of a chip as `npu-smi info` names it; None where it is not one of these."""
    return next((family for family in FAMILIES if name.startswith(family.names)), None)
