"""What a plugin says, checked before it is believed: hooks, manifest, versions, claims, offers.

Each function returns a `Problem` or None. No torch and no pydantic, since this runs in every process that looks for
platforms.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, get_args

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from vllm_core.api import (
    API_VERSION,
    CAPABILITIES,
    OPS,
    Companion,
    Full,
    Manifest,
    NotImplementedYet,
    Offer,
    Partial,
    ProgramOffer,
    Reuse,
    Unsupported,
    Versioned,
)
from vllm_core.api.capability import Support, names_of
from vllm_core.api.manifest import SupportLevel
from vllm_core.api.version import is_loadable, parse
from vllm_core.errors import nearest
from vllm_core.registry.plan import Stage
from vllm_core.version import __version__

CORE = "core"
"""Name of core's own step program; no plugin may take it."""

REFERENCE = "reference"
"""Provider name of core's own references; no plugin may take it."""

MAX_LEVEL = 5
"""Highest level of the conformance suite."""

_SUPPORT = (Full, Versioned, Partial, NotImplementedYet, Unsupported)
_TEXTS = ("name", "vendor", "device_type", "api_version", "core_range", "note")


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a plugin cannot be used, and what to do."""

    stage: Stage
    cause: str
    fix: str


def check_manifest(manifest: object, entry_point: str) -> Problem | None:
    """Check shape, name, API version, core range and claims, in this order."""
    if not isinstance(manifest, Manifest):
        return Problem(
            "manifest",
            f"the hook 'manifest' returned {type(manifest).__name__}, not a vllm_core.api.Manifest",
            "return a Manifest",
        )
    return (
        _check_shape(manifest)
        or _check_name(manifest, entry_point)
        or _check_api_version(manifest)
        or _check_core_range(manifest)
        or _check_reuses(manifest)
        or _check_companions(manifest)
        or _check_claims(manifest)
    )


def claim(manifest: Manifest, name: str) -> Support:
    """The manifest's claim; a capability newer than its API version counts as unsupported."""
    if name in CAPABILITIES and CAPABILITIES[name].since > parse(manifest.api_version):
        return Unsupported(f"newer than the plugin's API version {manifest.api_version}")
    return manifest.claims.get(name, Unsupported("no such capability"))


def _check_shape(manifest: Any) -> Problem | None:
    """Types at run time are what the plugin made them, whatever its annotations say."""
    wrong = [name for name in _TEXTS if not isinstance(getattr(manifest, name), str)]
    if not isinstance(manifest.claims, Mapping):
        wrong.append("claims")
    else:
        wrong += [f"claims[{name!r}]" for name, value in manifest.claims.items() if not isinstance(value, _SUPPORT)]
    if manifest.support_level not in get_args(SupportLevel):
        wrong.append("support_level")
    if manifest.device_class not in ("accelerator", "host"):
        wrong.append("device_class")
    if not isinstance(manifest.visible_devices_env, str | None):
        wrong.append("visible_devices_env")
    if not isinstance(manifest.architectures, tuple) or not all(isinstance(a, str) for a in manifest.architectures):
        wrong.append("architectures")
    if not isinstance(manifest.reuses, tuple) or not all(
        isinstance(one, Reuse) and isinstance(one.platform, str) and isinstance(one.architectures, Mapping)
        for one in manifest.reuses
    ):
        wrong.append("reuses")
    if not isinstance(manifest.companions, tuple) or not all(
        isinstance(one, Companion) and isinstance(one.name, str) and isinstance(one.versions, str)
        for one in manifest.companions
    ):
        wrong.append("companions")
    if not isinstance(manifest.conformance_level, int) or not 0 <= manifest.conformance_level <= MAX_LEVEL:
        wrong.append("conformance_level")
    if not wrong:
        return None
    return Problem(
        "manifest",
        f"wrong type or value in: {', '.join(wrong)}",
        f"see vllm_core.api.Manifest; its fields are {', '.join(f.name for f in fields(Manifest))}",
    )


def _check_name(manifest: Manifest, entry_point: str) -> Problem | None:
    if manifest.name == entry_point:
        return None
    return Problem(
        "manifest",
        f"the entry point is named {entry_point!r}, the manifest says {manifest.name!r}",
        "give both one name: a platform is chosen by its entry point before it is imported",
    )


def _check_api_version(manifest: Manifest) -> Problem | None:
    ours = f"{API_VERSION[0]}.{API_VERSION[1]}"
    try:
        version = parse(manifest.api_version)
    except ValueError as error:
        return Problem("manifest", str(error), f"api_version is a string like {ours!r}")
    if is_loadable(version):
        return None
    side = "plugin" if version < API_VERSION else "vllm-core"
    return Problem(
        "version",
        f"built for API {manifest.api_version}, this core has API {ours} and loads its own major and the one before",
        f"install a newer {side}",
    )


def _check_core_range(manifest: Manifest) -> Problem | None:
    try:
        allowed = SpecifierSet(manifest.core_range)
    except InvalidSpecifier as error:
        return Problem("manifest", f"core_range: {error}", "core_range is a version range like '>=0.1,<0.2'")
    # A development version is judged as the release that it will be.
    if allowed.contains(Version(__version__).base_version, prereleases=True):
        return None
    return Problem(
        "version",
        f"asks for vllm-core {manifest.core_range}, found {__version__}",
        f"install vllm-core {manifest.core_range}, or a version of the plugin made for {__version__}",
    )


def _check_reuses(manifest: Manifest) -> Problem | None:
    for one in manifest.reuses:
        try:
            SpecifierSet(one.versions)
        except InvalidSpecifier as error:
            return Problem("manifest", f"reuses {one.platform!r}: {error}", "versions is a range like '>=0.1,<0.2'")
        if one.platform == manifest.name:
            return Problem("manifest", f"reuses itself, {one.platform!r}", "name another platform")
    return None


def _check_companions(manifest: Manifest) -> Problem | None:
    for one in manifest.companions:
        try:
            SpecifierSet(one.versions)
        except InvalidSpecifier as error:
            return Problem("manifest", f"companions, {one.name!r}: {error}", "versions is a range like '>=2.10,<3'")
        unknown = sorted(set(one.architectures) - set(manifest.architectures))
        if unknown:
            cause = f"companions, {one.name!r}: concerns {unknown[0]!r}, which is none of the manifest's architectures"
            return Problem("manifest", cause, nearest(unknown[0], manifest.architectures))
    return None


def _check_claims(manifest: Manifest) -> Problem | None:
    version = parse(manifest.api_version)
    missing = sorted(names_of(version) - set(manifest.claims))
    if missing:
        return Problem(
            "claims",
            f"no claim for {', '.join(missing)}",
            f"answer for every capability of API {manifest.api_version}, with Unsupported(why) where it is absent",
        )
    unknown = sorted(set(manifest.claims) - set(CAPABILITIES))
    if unknown and version <= API_VERSION:
        return Problem(
            "claims",
            f"claims {unknown[0]!r}, which API {manifest.api_version} does not have",
            nearest(unknown[0], CAPABILITIES),
        )
    return None


def check_offers(offers: object, *, newer: bool = False) -> Problem | None:
    """Check offers. `newer`: the plugin was built for a later minor, so that names unknown here are no mistake."""
    if not isinstance(offers, Sequence) or not all(isinstance(offer, Offer) for offer in offers):
        return Problem(
            "offers", "the hook 'offers' did not return a sequence of vllm_core.api.Offer", "return a sequence of Offer"
        )
    for offer in offers:
        problem = _check_offer(offer, newer)
        if problem is not None:
            return problem
    return None


def check_programs(programs: Sequence[object]) -> Problem | None:
    """Check step programs: each has a name of its own."""
    names = []
    for one in programs:
        if not isinstance(one, ProgramOffer):
            return Problem("programs", f"the hook 'programs' returned {type(one).__name__}", "return ProgramOffer objects")
        if not one.name or one.name == CORE or one.name in names:
            return Problem("programs", f"a program is named {one.name!r}", f"give each a name of its own, not {CORE!r}")
        names.append(one.name)
    return None


def _check_offer(offer: Offer, newer: bool) -> Problem | None:
    if not offer.provider or offer.provider == REFERENCE:
        return Problem(
            "offers", f"a provider is named {offer.provider!r}", f"choose a name; {REFERENCE!r} is core's own provider"
        )
    for op, entry in offer.ops.items():
        if op not in OPS and not newer:
            return _unknown(offer, "op", op, OPS)
        module, _, name = entry.partition(":")
        if not module or not name:
            return Problem(
                "offers", f"provider {offer.provider!r}, op {op!r}: entry is {entry!r}", "entries are 'module:callable'"
            )
    features = {feature for spec in OPS.values() for feature in spec.features}
    unknown = sorted(offer.features - features)
    if unknown and not newer:
        return _unknown(offer, "feature", unknown[0], features)
    if offer.kv_layout is None and any(op in OPS and OPS[op].family == "kv" for op in offer.ops):
        return Problem("offers", f"provider {offer.provider!r} offers the family kv without kv_layout", "give kv_layout")
    return None


def _unknown(offer: Offer, what: str, name: str, known: Iterable[str]) -> Problem:
    return Problem("offers", f"provider {offer.provider!r} offers {what} {name!r}, which does not exist", nearest(name, known))
