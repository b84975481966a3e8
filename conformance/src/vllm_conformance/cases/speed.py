"""L5: speed on a small model with random weights, measured and reported, not judged. Planning; imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from vllm_conformance.case import Case
from vllm_core.api import DeviceFacts, Offer, Support


def collect(claims: Mapping[str, Support], offers: Sequence[Offer], facts: DeviceFacts) -> Iterator[Case]:
    """One row of numbers, the same for every platform: they are taken from one engine."""
    yield Case("L5/engine", 5, "speed:engine", "large", "vllm_conformance.cases.runs.speed:engine_speed")
