"""Who serves each call site: offers matched against what the site needs, families chosen together. Pure.

A unit is what is chosen at once: one op at one role, or all ops of a family there. A fused op of a family that has a
decomposition is optional: a provider without it still serves the family. Its site stays unbound, and the parts of its
decomposition are bound at the same role for core to compose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from vllm_core.api import PLAIN, CallSite, Offer, ProviderKind, Rejected
from vllm_core.api.ops import OPS, WHOLES, get
from vllm_core.registry.load import attempt, describe_error
from vllm_core.registry.plan import Binding, Candidate, Needs, RejectedCandidate

_ORDER: Mapping[ProviderKind, int] = {"kernel": 0, "vendor": 0, "reference": 1, "host": 2}


@dataclass(frozen=True, slots=True)
class Unit:
    """Call sites that one offer must serve together."""

    family: str | None
    role: str
    sites: tuple[CallSite, ...]

    @property
    def name(self) -> str:
        """For a person: ``kv at kv.0.full``."""
        return f"{self.family or self.sites[0].op} at {self.role}"

    @property
    def is_kv(self) -> bool:
        """Whether it has a KV layout."""
        return self.family == "kv"

    def is_needed(self, needs: Needs) -> bool:
        """Whether a plan must have a provider: of what stands in for others only where the user names one."""
        return not all(site.op in WHOLES and site.op not in needs.providers for site in self.sites)

    def optional(self, site: CallSite) -> bool:
        """Whether the family can do without this fused op."""
        return self.family is not None and bool(OPS[site.op].decomposition)


@dataclass(frozen=True, slots=True)
class Choice:
    """Accepted offers of a unit, best first, with the ops that each serves; what was rejected; why the first won."""

    unit: Unit
    accepted: tuple[tuple[Offer, frozenset[str]], ...]
    rejected: tuple[RejectedCandidate, ...]
    forced: bool

    @property
    def best(self) -> Offer:
        """The chosen offer."""
        return self.accepted[0][0]

    def parts(self) -> tuple[CallSite, ...]:
        """Call sites of the decompositions that core composes, because the chosen offer lacks the fused op."""
        fused = [site for site in self.unit.sites if self.accepted and site.op not in self.accepted[0][1]]
        return tuple(
            CallSite(op=part, role=site.role, dtype=site.dtype, features=site.features & OPS[part].features)
            for site in fused
            for part in OPS[site.op].decomposition
            if OPS[part].family != self.unit.family
        )

    def why_unserved(self) -> tuple[str, ...]:
        """One line with every refusal, if no offer was accepted."""
        if self.accepted:
            return ()
        refusals = [f"{one.candidate} ({one.reason})" for one in self.rejected]
        return (f"nobody serves {self.unit.name}: {', '.join(refusals) or 'no offer'}",)


def units_of(sites: Sequence[CallSite]) -> tuple[Unit, ...]:
    """Group call sites into units, in the order of their first site."""
    groups: dict[tuple[str, str], list[CallSite]] = {}
    for site in sites:
        family = get(site.op).family
        groups.setdefault((family or f"op {site.op}", site.role), []).append(site)
    return tuple(Unit(OPS[group[0].op].family, group[0].role, tuple(group)) for group in groups.values())


def choose(unit: Unit, candidate: Candidate, needs: Needs) -> Choice:
    """Judge every offer of the candidate for the unit. `accepted` is empty if nobody serves it."""
    forced = forced_provider(unit, needs)
    accepted, rejected = [], []
    for offer in sorted(candidate.offers, key=lambda one: rank(one, needs)):
        ops = {site.op for site in unit.sites} & set(offer.ops)
        if not ops:
            continue
        verdict = _permit(offer, forced, candidate, needs) or _cover(unit, offer, candidate.devices[0].architecture)
        if isinstance(verdict, frozenset):
            accepted.append((_as_run(offer, candidate), verdict))
        else:
            rejected.append(RejectedCandidate(subject=unit.name, candidate=offer.provider, reason=verdict))
    if forced is not None and not accepted and not any(one.candidate == forced for one in rejected):
        reason = f"forced, but not offered; offered by: {', '.join(provider_names(candidate, unit)) or 'nobody'}"
        rejected.append(RejectedCandidate(subject=unit.name, candidate=forced, reason=reason))
    return Choice(unit, tuple(accepted), tuple(rejected), forced is not None)


def forced_provider(unit: Unit, needs: Needs) -> str | None:
    """The provider that the user forces for one of the unit's ops, else for all.

    Collectives are forced by their own names alone: their handles come from the device's communicator, which other
    providers may know nothing of.
    """
    named = sorted({needs.providers[site.op] for site in unit.sites if site.op in needs.providers})
    if named or unit.family == "comm":
        return named[0] if named else None
    return needs.providers.get("all")


def provider_names(candidate: Candidate, unit: Unit | None = None) -> tuple[str, ...]:
    """Providers of a candidate, of all ops or of a unit's."""
    ops = set(OPS) if unit is None else {site.op for site in unit.sites}
    return tuple(sorted({offer.provider for offer in candidate.offers if ops & set(offer.ops)}))


def bindings_of(choice: Choice, needs: Needs) -> tuple[Binding, ...]:
    """One binding per op that the chosen offer serves. Who was forced, or is strict, has no fallbacks."""
    offer, covered = choice.accepted[0]
    others = [] if choice.forced or needs.strict else [one for one, ops in choice.accepted[1:] if ops >= covered]
    ops = dict.fromkeys(site.op for site in choice.unit.sites if site.op in covered)
    return tuple(
        Binding(
            op=op,
            role=choice.unit.role,
            provider=offer.provider,
            entry=offer.ops[op],
            kind=offer.kind,
            fallbacks=tuple((other.provider, other.ops[op], other.kind) for other in others),
            formats=tuple(sorted(offer.formats - {PLAIN})),
        )
        for op in ops
    )


def rank(offer: Offer, needs: Needs | None = None) -> tuple[int, int, int, str]:
    """Order of offers, best first: kernels, references, host; who reads more of the checkpoint's weights as they are; then
    priority; then name.
    """
    present = {} if needs is None else needs.weight_formats or dict.fromkeys(needs.rounded_formats, 1)
    read = sum(count for name, count in present.items() if name in offer.formats)
    return _ORDER[offer.kind], -read, -offer.priority, offer.provider


def _as_run(offer: Offer, candidate: Candidate) -> Offer:
    """A reference runs on the host where the device does not run eagerly."""
    return replace(offer, kind="host") if offer.kind == "reference" and not candidate.eager_full else offer


def _permit(offer: Offer, forced: str | None, candidate: Candidate, needs: Needs) -> str | None:
    if offer.provider in needs.denied_providers:
        return "denied by the user"
    if forced is not None and offer.provider != forced:
        return f"the user forces {forced}"
    if offer.kind == "reference" and not candidate.eager_full and not needs.allow_host_ops:
        return "references do not run on this device; --allow-host-ops runs them on the host"
    if offer.kind == "host" and not needs.allow_host_ops:
        return "runs on the host; --allow-host-ops permits it"
    return None


def _cover(unit: Unit, offer: Offer, architecture: str) -> frozenset[str] | str:
    """The ops of the unit that the offer serves, or why it cannot serve the unit."""
    covered = set()
    for site in unit.sites:
        reason = _refusal(offer, site, architecture)
        if reason is None:
            covered.add(site.op)
        elif not unit.optional(site):
            return reason
    return frozenset(covered)


def _refusal(offer: Offer, site: CallSite, architecture: str) -> str | None:
    if site.op not in offer.ops:
        return f"its family is served whole or not at all, and {site.op} is missing"
    version = offer.op_versions.get(site.op, 1)
    if version != OPS[site.op].version:
        return str(Rejected(f"version of {site.op}", str(OPS[site.op].version), str(version)))
    verdict = attempt(lambda: offer.judge(site, architecture))
    if isinstance(verdict, Exception):
        return f"{site.op}: accepts raised {describe_error(verdict)}"
    return f"{site.op}: {verdict}" if isinstance(verdict, Rejected) else None
