"""The step program of a candidate: core's own, or one that the platform brings. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from vllm_core.api import DeviceFacts, KVLayout, ProgramOffer
from vllm_core.registry.negotiate import layout_of
from vllm_core.registry.plan import Candidate, KVGroupPlan, Needs, RejectedCandidate
from vllm_core.registry.validate import CORE


@dataclass(frozen=True, slots=True)
class Brought:
    """A program of the platform that can run the model; `why` it goes before core's own, or None where it does not."""

    offer: ProgramOffer
    kv_groups: tuple[KVGroupPlan, ...]
    why: str | None


@dataclass(frozen=True, slots=True)
class NoneBrought:
    """The platform's programs cannot, or were not asked; every reason."""

    reasons: tuple[RejectedCandidate, ...]


def find_program(needs: Needs, candidate: Candidate, device: DeviceFacts) -> Brought | NoneBrought:
    """The program that the user named, else the first that was proven faster, else the first that could run the model."""
    if needs.program == CORE:
        return NoneBrought(())
    asked = [one for one in candidate.programs if needs.program in (None, one.name)]
    found, rejected = [], []
    for offer in asked:
        groups = _judge(offer, needs, device)
        if isinstance(groups, str):
            rejected.append(RejectedCandidate(subject="program", candidate=offer.name, reason=groups))
        else:
            found.append(Brought(offer, groups, _why_first(offer, needs)))
    if found:
        return min(found, key=lambda one: one.why is None)
    if needs.program is not None and not asked:
        listing = ", ".join(one.name for one in candidate.programs) or "none"
        rejected.append(RejectedCandidate(subject="program", candidate=needs.program, reason=f"it brings {listing}"))
    return NoneBrought(tuple(rejected))


def _why_first(offer: ProgramOffer, needs: Needs) -> str | None:
    if needs.program is not None:
        return "as the user asked"
    return None if offer.proven_faster is None else f"proven faster: {offer.proven_faster}"


def _judge(offer: ProgramOffer, needs: Needs, device: DeviceFacts) -> tuple[KVGroupPlan, ...] | str:
    """The KV groups as the program lays them out, or why it cannot run the model."""
    wanted = (
        ("model", needs.architecture, offer.architectures or None),
        ("device", device.architecture, offer.devices or None),
        ("dtype", needs.dtype, offer.dtypes),
        ("KV dtype", needs.kv_dtype, offer.kv_dtypes if needs.kv_groups else None),
        ("block size", needs.block_size, offer.block_sizes if needs.kv_groups and needs.block_size is not None else None),
    )
    for what, value, supported in wanted:
        if supported is not None and value not in supported:
            return f"{what}: wanted {value}, supported {_listing(supported)}"
    if needs.workers > 1:
        return f"workers: wanted {needs.workers}, a brought program runs on one"
    if needs.compiler:
        return "the model is to be compiled, and a brought program has its own code"
    if needs.providers:
        return "providers were forced, and a brought program has its own code instead of call sites"
    return _groups(offer, needs)


def _groups(offer: ProgramOffer, needs: Needs) -> tuple[KVGroupPlan, ...] | str:
    """One block size for all groups: the user's, else the first that has a layout for each."""
    why = ""
    for size in offer.block_sizes if needs.block_size is None else (needs.block_size,):
        layouts = [layout_of(offer, group, needs.kv_dtype, size) for group in needs.kv_groups]
        refused = [one for one in layouts if isinstance(one, str)]
        if not refused:
            pairs = zip(needs.kv_groups, layouts, strict=True)
            return tuple(KVGroupPlan(spec=group, layout=layout) for group, layout in pairs if isinstance(layout, KVLayout))
        why = why or f"block size {size}: {refused[0]}"
    return why or "it names no block size"


def _listing(values: Iterable[object]) -> str:
    return ", ".join(sorted(map(str, values))) or "none"
