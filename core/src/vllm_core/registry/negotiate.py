"""The block size of the KV groups, settled over all of them and their providers before weights load. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from vllm_core.api import KVGroupSpec, KVLayout, Offer, ProgramOffer
from vllm_core.registry.load import attempt, describe_error
from vllm_core.registry.plan import Candidate, KVGroupPlan, Needs, RejectedCandidate
from vllm_core.registry.providers import Choice, Unit, bindings_of, choose, rank, units_of

BLOCK_SIZES = (16, 32, 64, 128, 256, 8, 1)
"""Tokens per block in the order tried; a size at which better providers serve goes first."""


@dataclass(frozen=True, slots=True)
class GroupChoice:
    """Who serves a KV group, with the layout of each accepted offer in the same order."""

    choice: Choice
    spec: KVGroupSpec
    layouts: tuple[KVLayout, ...]

    def plan(self, needs: Needs) -> KVGroupPlan:
        """The group as the Plan has it."""
        providers = [provider for provider, _, _ in bindings_of(self.choice, needs)[0].fallbacks]
        by_provider = {offer.provider: layout for (offer, _), layout in zip(self.choice.accepted, self.layouts, strict=True)}
        return KVGroupPlan(
            spec=self.spec,
            role=self.choice.unit.role,
            layout=self.layouts[0],
            fallbacks=tuple((provider, by_provider[provider]) for provider in providers),
        )


@dataclass(frozen=True, slots=True)
class Negotiated:
    """One block size for all groups; `reasons` say why it is that."""

    groups: tuple[GroupChoice, ...]
    reasons: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Unserved:
    """No block size at which every group is served."""

    reasons: tuple[str, ...]


def negotiate(needs: Needs, candidate: Candidate) -> Negotiated | Unserved:
    """Take the user's block size, else the one with the best providers; of equal ones the first in the list."""
    units = [unit for unit in units_of(needs.sites) if unit.is_kv]
    if not units:
        return Negotiated((), ())
    sizes = BLOCK_SIZES if needs.block_size is None else (needs.block_size,)
    tried = {size: tuple(_at_size(unit, size, needs, candidate) for unit in units) for size in sizes}
    served = {size: groups for size, groups in tried.items() if all(group.choice.accepted for group in groups)}
    if not served:
        return Unserved(_explain(tried))
    size = min(served, key=lambda one: ([rank(group.choice.best)[:3] for group in served[one]], sizes.index(one)))
    why = "as the user asked" if needs.block_size is not None else f"the best providers serve it; served: {_names(served)}"
    return Negotiated(served[size], (("block_size", f"{size}: {why}"),))


def _at_size(unit: Unit, size: int, needs: Needs, candidate: Candidate) -> GroupChoice:
    """Choose for one group at one block size; an offer that gives no layout for it is rejected."""
    sized = replace(unit, sites=tuple(replace(site, tokens_per_block=size) for site in unit.sites))
    choice = choose(sized, candidate, needs)
    group = next(one for one in needs.kv_groups if one.index == unit.sites[0].group)
    answers = [(one, layout_of(one[0], group, needs.kv_dtype, size)) for one in choice.accepted]
    refused = tuple(
        RejectedCandidate(subject=unit.name, candidate=one[0].provider, reason=answer)
        for one, answer in answers
        if isinstance(answer, str)
    )
    kept = [(one, answer) for one, answer in answers if isinstance(answer, KVLayout)]
    return GroupChoice(
        replace(choice, accepted=tuple(one for one, _ in kept), rejected=(*choice.rejected, *refused)),
        group,
        tuple(layout for _, layout in kept),
    )


def layout_of(offer: Offer | ProgramOffer, group: KVGroupSpec, dtype: str, size: int) -> KVLayout | str:
    """The offer's layout, or why it gives none."""
    make = offer.kv_layout
    if make is None:
        return "it gives no KV layout"
    layout = attempt(lambda: make(group, dtype, size))
    if isinstance(layout, Exception):
        return f"kv_layout raised {describe_error(layout)}"
    if layout.tokens_per_block != size or layout.block_bytes <= 0:
        return (
            f"kv_layout answered {layout.tokens_per_block} tokens and {layout.block_bytes} bytes for a block of {size} tokens"
        )
    return layout


def _explain(tried: Mapping[int, tuple[GroupChoice, ...]]) -> tuple[str, ...]:
    """Where every group is served at some size: that they have none in common. Else the refusals at the first size."""
    by_group = list(zip(*tried.values(), strict=True))
    served = [[size for size, group in zip(tried, column, strict=True) if group.choice.accepted] for column in by_group]
    if all(served):
        listing = "; ".join(f"group {index}: {_names(sizes)}" for index, sizes in enumerate(served))
        return (f"no block size serves all KV groups ({listing})",)
    first = next(iter(tried))
    return tuple(f"block size {first}: {reason}" for group in tried[first] for reason in group.choice.why_unserved())


def _names(sizes: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(sizes)))
