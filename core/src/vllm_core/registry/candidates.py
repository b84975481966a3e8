"""Everything installed, looked at once: which platforms can be chosen from, with devices and offers, and which failed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

from vllm_core.api import DeviceFacts, KVGroupSpec, KVLayout, Offer, ProbeReport, ProgramOffer
from vllm_core.api.manifest import Check
from vllm_core.api.ops import FP8_ACTIVATION, INT8_ACTIVATION, OPS, WHOLES
from vllm_core.errors import PluginError
from vllm_core.registry.discover import Found, enabled, find, foreign
from vllm_core.registry.hardware import Sighting, known_plugins, scan
from vllm_core.registry.load import Loaded, load
from vllm_core.registry.plan import Candidate, Failed
from vllm_core.registry.reuse import borrow, lenders, owner_of
from vllm_core.registry.validate import REFERENCE
from vllm_core.registry.vet import probe_all, vet

PLATFORM_VARIABLE = "VLLM_PLATFORM"
REFERENCE_PRIORITY = -1000
_FLOATS = frozenset({"float32", "bfloat16", "float16"})
_KV_CODES = frozenset({"fp8", "fp8_e4m3", "fp8_e5m2", "int8"})
_ROUNDING = frozenset({INT8_ACTIVATION, FP8_ACTIVATION})
"""Features by which kernels are faster: a reference, which is exact and slow, does not stand in for one that rounds."""


@dataclass(slots=True)
class Plugins:
    """Loaded plugins by role, and those that failed. `lent` are those whose ops others reuse, by platform."""

    platforms: list[Loaded] = field(default_factory=list)
    kernels: list[Loaded] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)
    lent: dict[str, list[Loaded]] = field(default_factory=dict)


def requested(option: str | None, environ: Mapping[str, str]) -> str | None:
    """What the user forces, a platform or several in order: the option, else `VLLM_PLATFORM`."""
    return option or environ.get(PLATFORM_VARIABLE) or None


def names_in(text: str) -> tuple[str, ...]:
    """The names of ``"a,b"``, in order."""
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def collect(
    *, only: str | None = None, environ: Mapping[str, str], root: Path = Path("/"), use_cache: bool = True
) -> tuple[list[Candidate], list[Failed]]:
    """Load, probe and ask every enabled plugin, or those that ``only`` (or `VLLM_PLATFORM`) names.

    A name that an entry point has imports no other platform. Otherwise it may be a vendor, which only manifests tell.
    What was never imported here is imported in a child process first; probes run side by side. ``root`` is the file system
    in which hardware of missing plugins is looked for.
    """
    name = requested(only, environ)
    found = find()
    allowed = enabled(found, environ)
    vetted = vet(narrow(allowed, name), environ=environ, use_cache=use_cache)
    plugins = _load(vetted.safe)
    plugins.failed += vetted.failed
    if name is not None:
        _keep_vendors(plugins, names_in(name))
    borrowed = vet(lenders(plugins.platforms, allowed), environ=environ, use_cache=use_cache, look=False)
    plugins.failed += [one for one in borrowed.failed if one not in plugins.failed]
    _lend(plugins, borrowed.safe)
    sightings = scan(root)
    candidates: list[Candidate] = []
    reports = probe_all(plugins.platforms, vetted.reports, environ=environ, use_cache=use_cache)
    for loaded, report in zip(plugins.platforms, reports, strict=True):
        failure = report if isinstance(report, Failed) else _unusable(loaded, report, sightings, environ)
        if failure is not None:
            plugins.failed.append(failure)
        if isinstance(report, ProbeReport) and failure is None:
            candidates += with_offers(loaded, report, plugins)
    failed = [_with_visibility(one, sightings) for one in plugins.failed + foreign()]
    return candidates, failed + _missing(sightings, found, failed)


def narrow(found: Sequence[Found], name: str | None) -> list[Found]:
    """Keep what answers to ``name`` (or to one of several), with the kernel packages of those platforms.

    Everything, if one of them may be a vendor's name: nothing answers to it, nor is it a platform of ours.
    """
    if name is None:
        return list(found)
    ours = {alias for one in known_plugins() for alias in (one.platform, one.distribution)}
    answers = {
        one: [plugin for plugin in found if not plugin.kernels_only and plugin.answers_to(one)] for one in names_in(name)
    }
    if not any(answers.values()) or any(not plugins and one not in ours for one, plugins in answers.items()):
        return list(found)
    chosen = set(chain.from_iterable(answers.values()))
    platforms = {one.platform for one in chosen}
    return [one for one in found if one in chosen or (one.kernels_only and one.platform in platforms)]


def load_all(found: Iterable[Found]) -> Plugins:
    """Load each, and those whose ops they reuse; none can hide another."""
    plugins = _load(found)
    _lend(plugins, lenders(plugins.platforms, find()))
    return plugins


def _lend(plugins: Plugins, found: Iterable[Found]) -> None:
    """Load what is reused, once."""
    loaded = {one.found.key: one for one in (*plugins.platforms, *plugins.kernels)}
    for one in found:
        owner = loaded.get(one.key) or load(one)
        if isinstance(owner, Loaded):
            plugins.lent.setdefault(one.platform, []).append(owner)
        elif owner.key not in [failure.key for failure in plugins.failed]:
            plugins.failed.append(owner)


def _load(found: Iterable[Found]) -> Plugins:
    plugins = Plugins()
    for one in found:
        loaded = load(one)
        if isinstance(loaded, Failed):
            plugins.failed.append(loaded)
        elif one.kernels_only:
            plugins.kernels.append(loaded)
        else:
            plugins.platforms.append(loaded)
    return plugins


def _keep_vendors(plugins: Plugins, names: Sequence[str]) -> None:
    """Drop platforms that none of the names means before they are probed, where one is a vendor's."""
    vendors = {one.manifest.vendor for one in plugins.platforms if one.manifest is not None}
    if vendors & set(names):
        plugins.platforms = [
            one
            for one in plugins.platforms
            if one.manifest is not None and any(one.found.answers_to(name) or one.manifest.vendor == name for name in names)
        ]


def with_offers(loaded: Loaded, report: ProbeReport, plugins: Plugins) -> list[Candidate]:
    """One candidate per device architecture, with the offers of the platform, of kernel packages, and the references."""
    assert loaded.manifest is not None
    devices: dict[str, list[DeviceFacts]] = {}
    for device in report.devices:
        devices.setdefault(device.architecture, []).append(device)
    candidates = []
    for group in devices.values() or [[]]:
        owners: dict[str, str] = {}
        offers, programs = _offers(loaded, group, plugins, owners), _programs(loaded, group, plugins)
        if offers is None or programs is None:
            return []
        candidates.append(
            Candidate(
                manifest=loaded.manifest,
                distribution=loaded.found.distribution,
                version=loaded.found.version,
                entry_point=loaded.found.entry_point,
                devices=tuple(group),
                checks=report.checks,
                offers=offers,
                eager_full=all(device.properties.get("eager", "full") == "full" for device in group),
                owners=owners,
                programs=programs,
            )
        )
    return candidates


def _programs(loaded: Loaded, devices: Sequence[DeviceFacts], plugins: Plugins) -> tuple[ProgramOffer, ...] | None:
    """The platform's own step programs for the first of equal devices; None where the hook fails."""
    try:
        return loaded.programs(devices[0]) if devices else ()
    except PluginError as error:
        plugins.failed.append(
            Failed(
                distribution=loaded.found.distribution,
                entry_point=loaded.found.entry_point,
                stage="programs",
                cause=error.found,
                fix=error.fix,
                error=error,
            )
        )
        return None


def _offers(
    loaded: Loaded, devices: Sequence[DeviceFacts], plugins: Plugins, owners: dict[str, str]
) -> tuple[Offer, ...] | None:
    """All offers for the first of equal devices; None where the platform's own fail. A kernel package fails alone.

    ``owners`` takes in whose they are, where they are not the platform's own.
    """
    if not devices:
        return reference_offers()
    offers: list[Offer] = []
    packages = [one for one in plugins.kernels if one.found.platform == loaded.found.platform]
    for owner in [loaded, *packages]:
        try:
            made = owner.offers(devices[0])
            if owner is not loaded:
                _check_providers(made, offers, owner)
                owners |= {one.provider: owner_of(owner) for one in made}
            offers += made
        except PluginError as error:
            failure = Failed(
                distribution=owner.found.distribution,
                entry_point=owner.found.entry_point,
                stage="offers",
                cause=error.found,
                fix=error.fix,
                error=error,
            )
            plugins.failed.append(failure)
            if owner is loaded:
                return None
    borrowed = borrow(loaded, devices[0], plugins.lent, taken={one.provider for one in offers})
    plugins.failed += borrowed.failed
    owners |= borrowed.owners
    return (*offers, *borrowed.offers, *reference_offers())


def _check_providers(made: Sequence[Offer], offers: Sequence[Offer], owner: Loaded) -> None:
    """A provider's name says whose an op is, so two distributions cannot share one. Raises PluginError."""
    both = sorted({one.provider for one in made} & {one.provider for one in offers})
    if both:
        raise PluginError(
            "Plugin failed",
            on=owner.found.key,
            found=f"its provider {both[0]!r} has the name of another distribution's on this platform",
            expected="a name of its own",
            fix="rename the provider; the distribution's name is a good one",
        )


def reference_offers() -> tuple[Offer, ...]:
    """Core's own references, of every op but `WHOLES`: the lowest priority, whole families together."""
    families: dict[str, list[str]] = {}
    for name, spec in OPS.items():
        if name in WHOLES:
            continue
        families.setdefault(spec.family or name, []).append(name)
    return tuple(
        Offer(
            provider=REFERENCE,
            ops={name: OPS[name].reference for name in names},
            kind="reference",
            dtypes=_FLOATS,
            kv_dtypes=_FLOATS | _KV_CODES,
            features=frozenset(feature for name in names for feature in OPS[name].features) - _ROUNDING,
            priority=REFERENCE_PRIORITY,
            op_versions={name: OPS[name].version for name in names},
            kv_layout=_reference_layout if family == "kv" else None,
        )
        for family, names in families.items()
    )


def _reference_layout(group: KVGroupSpec, dtype: str, tokens_per_block: int) -> KVLayout:
    from vllm_core.ops.layouts import kv_layout

    return kv_layout(group, dtype, tokens_per_block)


def _unusable(loaded: Loaded, report: ProbeReport, sightings: Sequence[Sighting], environ: Mapping[str, str]) -> Failed | None:
    """A probe that found no device although the hardware can be seen: a driver is missing, which is no reason to be silent."""
    if report.devices:
        return None
    variable = loaded.manifest.visible_devices_env if loaded.manifest is not None else None
    hidden = variable is not None and environ.get(variable) in ("", "-1", "none")
    seen = [one for one in sightings if one.plugin.platform == loaded.found.platform]
    if hidden or not seen:
        return None
    return Failed(
        distribution=loaded.found.distribution,
        entry_point=loaded.found.entry_point,
        stage="devices",
        cause=f"no usable device, although {seen[0]}; {check_summary(report.checks)}",
        fix="; ".join(check.hint for check in report.failures if check.hint) or "`vllm-core doctor` walks through the causes",
    )


def check_summary(checks: Sequence[Check]) -> str:
    """The failed checks of a probe in one line."""
    return "; ".join(f"{check.name}: {check.detail}" for check in checks if check.outcome == "failed") or "no check failed"


def _with_visibility(failed: Failed, sightings: Sequence[Sighting]) -> Failed:
    seen = any(one.plugin.platform == failed.entry_point.partition(".")[0] for one in sightings)
    return replace(failed, visible_hardware=seen)


def _missing(sightings: Sequence[Sighting], found: Sequence[Found], failed: Sequence[Failed]) -> list[Failed]:
    """Hardware for which no plugin is installed."""
    present = {one.platform for one in found} | {one.entry_point for one in failed}
    return [
        Failed(
            distribution=one.plugin.distribution,
            entry_point=one.plugin.platform,
            stage="missing",
            cause=f"{one}, but its plugin is not installed",
            fix=one.plugin.install,
            visible_hardware=True,
        )
        for one in sightings
        if one.plugin.platform not in present
    ]
