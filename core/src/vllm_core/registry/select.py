"""`Needs` x candidates -> one `Plan`, with a reason for everything that was not chosen. Pure: no clock, no machine.

Order: what the user asked for, what the model needs, support level, device class, memory, name.
What was asked for by name happens or raises. The host is never taken silently where an accelerator is visible.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vllm_core.api.ops import OPS
from vllm_core.errors import PlanError, PluginError, UnknownPlatformError, nearest
from vllm_core.registry.hardware import known_plugins
from vllm_core.registry.matching import Match, Mismatch, match
from vllm_core.registry.plan import Candidate, Failed, Needs, Plan, RejectedCandidate
from vllm_core.registry.providers import provider_names

_LEVELS = ("production", "beta", "experimental")
_CRITERIA = ("support level", "device class", "memory", "name")


def plan(needs: Needs, candidates: Sequence[Candidate], failed: Sequence[Failed]) -> Plan:
    """Decide. Raises UnknownPlatformError, PluginError or PlanError, each with every reason."""
    _check_names(needs, candidates)
    outcomes = [match(needs, candidate) for candidate in asked(needs.platform, candidates, failed)]
    fits = sorted((one for one in outcomes if isinstance(one, Match)), key=lambda one: _rank(one))
    misfits = sorted((one for one in outcomes if isinstance(one, Mismatch)), key=lambda one: _label(one.candidate))
    if not fits:
        raise _nothing_fits(needs, misfits, failed)
    best = fits[0]
    _refuse_silent_host(needs, best, misfits, failed)
    return Plan(
        platform=best.candidate.manifest.name,
        distribution=best.candidate.distribution,
        distribution_version=best.candidate.version,
        entry_point=best.candidate.entry_point,
        support_level=best.candidate.manifest.support_level,
        device=best.device,
        model=needs.model,
        architecture=needs.architecture,
        track=needs.track,
        program="core",
        dtype=needs.dtype,
        kv_dtype=needs.kv_dtype,
        bindings=best.bindings,
        kv_groups=best.kv_groups,
        graphs=best.graphs,
        reasons={"platform": _why(needs, fits), **dict(best.reasons)},
        rejected=(*_rejected_platforms(fits, misfits, failed), *best.rejected),
        notes=tuple(_notes(needs, fits, failed)),
    )


def _check_names(needs: Needs, candidates: Sequence[Candidate]) -> None:
    """Forced and denied names must exist somewhere: an option is never ignored."""
    for op in needs.providers:
        if op != "all" and op not in OPS:
            raise _bad_option("--provider", op, "an op, or 'all'", [*OPS, "all"])
    _check_families(needs)
    providers = {name for candidate in candidates for name in provider_names(candidate)}
    for name in sorted({*needs.providers.values(), *needs.denied_providers}):
        if candidates and name not in providers:
            raise _bad_option("--provider or --deny-provider", name, "a provider of an installed platform", providers)
    if needs.device_ids is not None and len(needs.device_ids) != 1:
        raise PlanError(
            "Wrong number of devices",
            on="device_ids",
            found=", ".join(needs.device_ids) or "none",
            expected="one device: this version runs a model on one, and never on several device types",
            fix="name one id; run one engine per device behind a router",
        )


def _check_families(needs: Needs) -> None:
    """Ops of one family are served by one provider, so they cannot be forced to two."""
    forced: dict[str, dict[str, str]] = {}
    for op, provider in needs.providers.items():
        family = OPS[op].family if op in OPS else None
        if family is not None:
            forced.setdefault(family, {})[op] = provider
    for name, choices in forced.items():
        if len(set(choices.values())) > 1:
            raise PlanError(
                "Ops of one family are forced to two providers",
                on=f"--provider, family {name}",
                found=", ".join(f"{op}={provider}" for op, provider in sorted(choices.items())),
                expected="one provider, since they share a private layout",
                fix=f"name one provider for {' and '.join(sorted(choices))}",
            )


def _bad_option(option: str, name: str, expected: str, known: Iterable[str]) -> PlanError:
    return PlanError("Unknown name", on=option, found=repr(name), expected=expected, fix=nearest(name, known))


def asked(name: str | None, candidates: Sequence[Candidate], failed: Sequence[Failed]) -> list[Candidate]:
    """The candidates that the user's choice leaves.

    Raises UnknownPlatformError if it names nothing that is installed, PluginError if it names a plugin that failed.
    """
    if name is None:
        return list(candidates)
    named = [one for one in candidates if name in _names(one)] or [one for one in candidates if name == one.manifest.vendor]
    if named:
        return named
    failure = next((one for one in failed if name in (one.entry_point, one.distribution, one.key)), None)
    if failure is None or failure.stage in ("missing", "foreign"):
        known = {alias for one in candidates for alias in (one.manifest.name, one.manifest.vendor)}
        raise UnknownPlatformError(
            "Unknown platform",
            on=name,
            found=failure.cause if failure is not None else "no installed plugin has this name",
            expected=f"one of the installed platforms: {', '.join(sorted(one.manifest.name for one in candidates)) or 'none'}",
            fix=failure.fix if failure is not None else _how_to_get(name, known | {one.entry_point for one in failed}),
        )
    raise _plugin_error(failure, f"platform {name}, which was asked for, to work", failure.fix)


def _how_to_get(name: str, installed: set[str]) -> str:
    """One of our own packages is to be installed, not mistaken for another platform whose name is near."""
    ours = next((one for one in known_plugins() if name in (one.platform, one.distribution)), None)
    return nearest(name, installed) if ours is None else ours.install


def _names(candidate: Candidate) -> tuple[str, ...]:
    key = f"{candidate.distribution}:{candidate.entry_point}"
    return candidate.manifest.name, candidate.entry_point, candidate.distribution, key


def _label(candidate: Candidate) -> str:
    architectures = {device.architecture for device in candidate.devices}
    return f"{candidate.distribution}:{candidate.entry_point}{''.join(f' ({one})' for one in sorted(architectures))}"


def _rank(one: Match) -> tuple[int, int, int, str, str]:
    manifest = one.candidate.manifest
    host = int(manifest.device_class == "host")
    return _LEVELS.index(manifest.support_level), host, -one.device.memory_bytes, manifest.name, _label(one.candidate)


def _plugin_error(failure: Failed, expected: str, fix: str) -> PluginError:
    error = PluginError("Plugin failed", on=failure.key, found=f"{failure.stage}: {failure.cause}", expected=expected, fix=fix)
    error.__cause__ = failure.error
    return error


def _nothing_fits(needs: Needs, misfits: Sequence[Mismatch], failed: Sequence[Failed]) -> PlanError:
    lines = [f"{_label(one.candidate)}: {reason}" for one in misfits for reason in one.reasons]
    lines += [str(one) for one in failed]
    fixes = [one.fix for one in failed]
    return PlanError(
        "No platform can run this model",
        on=f"{needs.model} ({needs.architecture}, {needs.dtype}, KV {needs.kv_dtype})",
        found="\n            ".join(lines) or "no platform is installed",
        expected="a platform that has all that the model and the options need",
        fix=fixes[0]
        if fixes
        else "change the option that is named above, or install a hardware package; see `vllm-core doctor`",
    )


def _refuse_silent_host(needs: Needs, best: Match, misfits: Sequence[Mismatch], failed: Sequence[Failed]) -> None:
    """The host by default, although an accelerator is here that cannot be used, is an error unless allowed."""
    if best.candidate.manifest.device_class != "host" or needs.platform is not None or needs.allow_fallback:
        return
    host = best.candidate.manifest.name
    ways = f"or ask for the host: --platform {host}, or --allow-fallback"
    for failure in failed:
        if failure.visible_hardware and failure.stage != "missing":
            raise _plugin_error(failure, "its plugin to work, since the hardware is visible", f"{failure.fix}; {ways}")
    for one in misfits:
        if one.candidate.manifest.device_class == "accelerator" and one.candidate.devices:
            raise PlanError(
                "Accelerator cannot run this model",
                on=_label(one.candidate),
                found="\n            ".join(one.reasons),
                expected="the accelerator to have what the model and the options need",
                fix=f"change what is named above, {ways}",
            )


def _why(needs: Needs, fits: Sequence[Match]) -> str:
    if needs.platform is not None:
        return f"asked for as {needs.platform!r}"
    return "the only one that can" if len(fits) == 1 else f"best of {len(fits)} by {_deciding(fits[0], fits[1])}"


def _deciding(better: Match, worse: Match) -> str:
    """The first criterion in which two matches differ."""
    pairs = zip(_CRITERIA, _rank(better), _rank(worse), strict=False)
    return next((name for name, left, right in pairs if left != right), "name of the distribution")


def _rejected_platforms(
    fits: Sequence[Match], misfits: Sequence[Mismatch], failed: Sequence[Failed]
) -> tuple[RejectedCandidate, ...]:
    pairs = [(_label(one.candidate), f"ranked behind by {_deciding(fits[0], one)}") for one in fits[1:]]
    pairs += [(_label(one.candidate), reason) for one in misfits for reason in one.reasons]
    pairs += [(one.key, f"{one.stage}: {one.cause}") for one in failed if one.stage != "missing"]
    return tuple(RejectedCandidate(subject="platform", candidate=name, reason=reason) for name, reason in pairs)


def _notes(needs: Needs, fits: Sequence[Match], failed: Sequence[Failed]) -> list[str]:
    """What a person should know although it works: failures, ties, and an accelerator that is not used."""
    best = fits[0]
    by_default = best.candidate.manifest.device_class == "host" and needs.platform is None
    notes = [f"{one}; fix: {one.fix}" for one in failed if one.stage != "missing"]
    notes += [f"{one.cause}; fix: {one.fix}" for one in failed if one.stage == "missing" and by_default]
    for other in fits[1:]:
        name = _label(other.candidate)
        if _rank(other)[:3] == _rank(best)[:3]:
            notes.append(f"tie with {name}, decided by name; --platform chooses")
        elif by_default and other.candidate.manifest.device_class == "accelerator":
            notes.append(f"the host ranks before {name} by {_deciding(best, other)}; --platform chooses")
    return notes
