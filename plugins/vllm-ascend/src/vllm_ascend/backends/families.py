"""Chip families: their names in the driver's tools, and what their public data sheets say. Plain data; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    """`names` are what `npu-smi info` prints for the family's chips; they begin with one of these.

    Rates of one device as torch sees it (910C: one of the two dies of a package): dense float16 products, and the memory's
    bandwidth. `source` says from where.
    """

    architecture: str
    names: tuple[str, ...]
    flops_per_s: float
    bytes_per_s: float
    memory_bytes: int
    source: str


ATLAS_A2 = Family(
    "910b",
    ("910B", "Ascend910B"),
    313e12,
    1.6e12,
    64 << 30,
    "910B3 as Huawei's forum for developers and public benchmarks of it give it; no data sheet was at hand",
)
ATLAS_A3 = Family(
    "910c",
    ("Ascend910", "910_93", "910C"),
    376e12,
    1.6e12,
    64 << 30,
    'Zuo et al., "Serving Large Language Models on Huawei CloudMatrix384", arXiv:2506.12708, 2025: one of two dies',
)

FAMILIES = (ATLAS_A2, ATLAS_A3)
ARCHITECTURES = tuple(family.architecture for family in FAMILIES)


def family_of(architecture: str) -> Family | None:
    """The family of an architecture such as ``910b``; None for another."""
    return next((family for family in FAMILIES if family.architecture == architecture), None)


def family_named(name: str) -> Family | None:
    """The family of a chip as `npu-smi info` names it; None where it is not one of these."""
    return next((family for family in FAMILIES if name.startswith(family.names)), None)
