"""Ops of another distribution's platform, reused by declaration: hardware that speaks its dialect (`Manifest.reuses`).

The other plugin is imported and asked for its offers, as if for its own device; it is neither probed nor opened.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from packaging.specifiers import SpecifierSet

from vllm_core.api import DeviceFacts, Offer
from vllm_core.api.manifest import Reuse
from vllm_core.errors import PluginError
from vllm_core.registry.discover import Found
from vllm_core.registry.load import Loaded
from vllm_core.registry.plan import Failed

REUSED_PRIORITY = -500
"""Added to the priority of a reused offer: own ops go first, references last."""


@dataclass(frozen=True, slots=True)
class Borrowed:
    """Offers taken over, with ``distribution version`` of each by provider, and what could not be taken."""

    offers: tuple[Offer, ...]
    owners: Mapping[str, str]
    failed: tuple[Failed, ...]


def lenders(platforms: Iterable[Loaded], installed: Sequence[Found]) -> list[Found]:
    """The plugins whose ops the platforms reuse, with the kernel packages that belong to them."""
    names = {reuse.platform for one in platforms if one.manifest is not None for reuse in one.manifest.reuses}
    return [one for one in installed if one.platform in names]


def borrow(loaded: Loaded, device: DeviceFacts, lent: Mapping[str, Sequence[Loaded]], taken: Set[str]) -> Borrowed:
    """Offers for ``device`` from the platforms that ``loaded`` reuses.

    ``lent`` has the loaded plugins by platform, ``taken`` the names of providers that are there already: theirs win.
    """
    assert loaded.manifest is not None
    offers: list[Offer] = []
    owners: dict[str, str] = {}
    failed: list[Failed] = []
    for reuse in loaded.manifest.reuses:
        if device.architecture not in reuse.architectures:
            continue
        plugins = lent.get(reuse.platform, ())
        problem = _problem(reuse, plugins)
        if problem is not None:
            failed.append(_failed(loaded, *problem))
            continue
        for owner in plugins:
            try:
                found = _offers_of(owner, plugins, reuse, device)
            except PluginError as error:
                failed.append(_failed(loaded, f"{owner.found.key}: {error.found}", error.fix))
                continue
            fresh = [one for one in found if one.provider not in taken]
            offers += fresh
            owners |= {one.provider: owner_of(owner) for one in fresh}
    return Borrowed(tuple(offers), owners, tuple(failed))


def owner_of(loaded: Loaded) -> str:
    """``distribution version``, as the Plan names whose ops they are."""
    return f"{loaded.found.distribution} {loaded.found.version}"


def _problem(reuse: Reuse, plugins: Sequence[Loaded]) -> tuple[str, str] | None:
    """Why nothing can be taken, and what to do."""
    platform = next((one for one in plugins if one.manifest is not None), None)
    if platform is None:
        return f"it reuses the ops of platform {reuse.platform!r}, which is not installed or failed", "install it, or repair it"
    if not SpecifierSet(reuse.versions).contains(platform.found.version, prereleases=True):
        found = f"{platform.found.distribution} {platform.found.version}"
        return f"it reuses the ops of {found}, and was tried with {reuse.versions}", f"install a version {reuse.versions}"
    return None


def _offers_of(owner: Loaded, plugins: Sequence[Loaded], reuse: Reuse, device: DeviceFacts) -> list[Offer]:
    """The owner's offers for what our device is to it, made to match our device."""
    theirs = reuse.architectures[device.architecture]
    platform = next(one.manifest for one in plugins if one.manifest is not None)
    posing = replace(device, device_type=platform.device_type, architecture=theirs)
    taken = []
    for offer in owner.offers(posing):
        ops = {op: entry for op, entry in offer.ops.items() if reuse.ops is None or op in reuse.ops}
        if not ops or (offer.architectures is not None and theirs not in offer.architectures):
            continue
        architectures = None if offer.architectures is None else frozenset({device.architecture})
        taken.append(replace(offer, ops=ops, architectures=architectures, priority=offer.priority + REUSED_PRIORITY))
    return taken


def _failed(loaded: Loaded, cause: str, fix: str) -> Failed:
    found = loaded.found
    return Failed(distribution=found.distribution, entry_point=found.entry_point, stage="reuse", cause=cause, fix=fix)
