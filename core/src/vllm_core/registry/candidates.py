"""Everything installed, looked at once: which platforms can be chosen from, with devices and offers, and which failed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from vllm_core.api import DeviceFacts, KVGroupSpec, KVLayout, Offer, ProbeReport
from vllm_core.api.manifest import Check
from vllm_core.api.ops import OPS
from vllm_core.errors import PluginError
from vllm_core.registry.discover import Found, enabled, find, foreign
from vllm_core.registry.hardware import Sighting, scan
from vllm_core.registry.load import Loaded, load
from vllm_core.registry.plan import Candidate, Failed
from vllm_core.registry.probe import probe
from vllm_core.registry.validate import REFERENCE

PLATFORM_VARIABLE = "VLLM_PLATFORM"
REFERENCE_PRIORITY = -1000
_FLOATS = frozenset({"float32", "bfloat16", "float16"})


@dataclass(slots=True)
class Plugins:
    """Loaded plugins by role, and those that failed."""

    platforms: list[Loaded] = field(default_factory=list)
    kernels: list[Loaded] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)


def requested(option: str | None, environ: Mapping[str, str]) -> str | None:
    """The platform that the user forces: the option, else `VLLM_PLATFORM`."""
    return option or environ.get(PLATFORM_VARIABLE) or None


def collect(
    *, only: str | None = None, environ: Mapping[str, str], root: Path = Path("/"), use_cache: bool = True
) -> tuple[list[Candidate], list[Failed]]:
    """Load, probe and ask every enabled plugin, or those that ``only`` (or `VLLM_PLATFORM`) names.

    A name that an entry point has imports no other platform. Otherwise it may be a vendor, which only manifests tell.
    ``root`` is the file system in which hardware of missing plugins is looked for.
    """
    name = requested(only, environ)
    found = find()
    chosen = narrow(enabled(found, environ), name)
    plugins = load_all(chosen)
    if name is not None:
        _keep_vendor(plugins, name)
    sightings = scan(root)
    candidates: list[Candidate] = []
    for loaded in plugins.platforms:
        report = probe(loaded, environ=environ, use_cache=use_cache)
        failure = report if isinstance(report, Failed) else _unusable(loaded, report, sightings, environ)
        if failure is not None:
            plugins.failed.append(failure)
        if isinstance(report, ProbeReport) and failure is None:
            candidates += with_offers(loaded, report, plugins)
    failed = [_with_visibility(one, sightings) for one in plugins.failed + foreign()]
    return candidates, failed + _missing(sightings, found, failed)


def narrow(found: Sequence[Found], name: str | None) -> list[Found]:
    """Keep what answers to ``name``, with the kernel packages of those platforms; everything if nothing does."""
    platforms = {one.platform for one in found if not one.kernels_only and name in (one.entry_point, one.distribution, one.key)}
    if name is None or not platforms:
        return list(found)
    return [
        one
        for one in found
        if one.platform in platforms and (one.kernels_only or name in (one.platform, one.distribution, one.key))
    ]


def load_all(found: Iterable[Found]) -> Plugins:
    """Load each; none can hide another."""
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


def _keep_vendor(plugins: Plugins, name: str) -> None:
    """Drop platforms of other vendors before they are probed, where ``name`` is a vendor."""
    vendors = [one for one in plugins.platforms if one.manifest is not None and one.manifest.vendor == name]
    if vendors:
        plugins.platforms = vendors


def with_offers(loaded: Loaded, report: ProbeReport, plugins: Plugins) -> list[Candidate]:
    """One candidate per device architecture, with the offers of the platform, of kernel packages, and the references."""
    assert loaded.manifest is not None
    devices: dict[str, list[DeviceFacts]] = {}
    for device in report.devices:
        devices.setdefault(device.architecture, []).append(device)
    candidates = []
    for group in devices.values() or [[]]:
        offers = _offers(loaded, group, plugins)
        if offers is None:
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
            )
        )
    return candidates


def _offers(loaded: Loaded, devices: Sequence[DeviceFacts], plugins: Plugins) -> tuple[Offer, ...] | None:
    """All offers for the first of equal devices; None where the platform's own fail. A kernel package fails alone."""
    offers: list[Offer] = []
    packages = [one for one in plugins.kernels if one.found.platform == loaded.found.platform]
    for owner in [loaded, *packages] if devices else []:
        try:
            offers += owner.offers(devices[0])
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
    return (*offers, *reference_offers())


def reference_offers() -> tuple[Offer, ...]:
    """Core's own references, of every op: the lowest priority, whole families together."""
    families: dict[str, list[str]] = {}
    for name, spec in OPS.items():
        families.setdefault(spec.family or name, []).append(name)
    return tuple(
        Offer(
            provider=REFERENCE,
            ops={name: OPS[name].reference for name in names},
            kind="reference",
            dtypes=_FLOATS,
            kv_dtypes=_FLOATS,
            features=frozenset(feature for name in names for feature in OPS[name].features),
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
