"""`Needs` x candidates -> one `Plan`, with a reason for everything that was not chosen. Pure: no clock, no machine.

Order: the user's, what the model needs, support level, conformance level, device class, dtype, memory, name.
What was asked for by name happens or raises. The host is never taken silently where an accelerator is visible.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vllm_core.api.ops import OPS
from vllm_core.errors import PlanError, nearest
from vllm_core.registry.asked import asked, passed_over, plugin_error, position
from vllm_core.registry.matching import Match, Mismatch, match
from vllm_core.registry.placement import check_ids, check_types
from vllm_core.registry.plan import Candidate, Failed, Needs, Plan, RejectedCandidate
from vllm_core.registry.providers import provider_names
from vllm_core.registry.validate import CORE

_LEVELS = ("production", "beta", "experimental")
_CRITERIA = ("the user's order", "support level", "conformance level", "device class", "dtype", "memory", "name")
_NAMES = -2
"""The last criteria are names: equal before them is a tie."""


def plan(needs: Needs, candidates: Sequence[Candidate], failed: Sequence[Failed]) -> Plan:
    """Decide. Raises UnknownPlatformError, PluginError or PlanError, each with every reason."""
    _check_names(needs, candidates)
    outcomes = [match(needs, candidate) for candidate in asked(needs.platform, candidates, failed)]
    fits = sorted((one for one in outcomes if isinstance(one, Match)), key=lambda one: _rank(needs, one))
    misfits = sorted((one for one in outcomes if isinstance(one, Mismatch)), key=lambda one: _label(one.candidate))
    if not fits:
        check_types(needs, [one.candidate for one in misfits])
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
        track="flat" if best.program is not None and best.program.kind == "flat" else needs.track,
        program=CORE if best.program is None else best.program.name,
        program_entry="" if best.program is None else best.program.entry,
        dtype=best.needs.dtype,
        kv_dtype=best.needs.kv_dtype,
        bindings=best.bindings,
        kv_groups=best.kv_groups,
        graphs=best.graphs,
        compiler=needs.compiler,
        tensor_parallel=needs.workers,
        devices=best.devices,
        reasons={"platform": _why(needs, fits), **dict(best.reasons)},
        rejected=(*_rejected_platforms(needs, fits, misfits, failed), *best.rejected),
        notes=(*_notes(needs, fits, failed), *passed_over(needs.platform, candidates, failed)),
        owners={name: owner for name, owner in best.candidate.owners.items() if name in _bound(best)},
    )


def _bound(best: Match) -> set[str]:
    """Providers that are chosen, or would take over."""
    fallbacks = {provider for one in best.bindings for provider, _, _ in one.fallbacks}
    return {one.provider for one in best.bindings} | fallbacks


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
    programs = {CORE, *(one.name for candidate in candidates for one in candidate.programs)}
    if needs.program is not None and needs.program not in programs:
        raise _bad_option("--program", needs.program, "core, or a program of an installed platform", programs)
    check_ids(needs, candidates)


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


def _label(candidate: Candidate) -> str:
    architectures = {device.architecture for device in candidate.devices}
    return f"{candidate.distribution}:{candidate.entry_point}{''.join(f' ({one})' for one in sorted(architectures))}"


def _rank(needs: Needs, one: Match) -> tuple[int, int, int, int, int, int, str, str]:
    manifest = one.candidate.manifest
    return (
        position(needs.platform, one.candidate),
        _LEVELS.index(manifest.support_level),
        -manifest.conformance_level,
        int(manifest.device_class == "host"),
        (needs, *needs.alternatives).index(one.needs),
        -one.device.memory_bytes,
        manifest.name,
        _label(one.candidate),
    )


def _nothing_fits(needs: Needs, misfits: Sequence[Mismatch], failed: Sequence[Failed]) -> PlanError:
    lines = [f"{_label(one.candidate)}: {reason}" for one in misfits for reason in one.reasons]
    lines += [str(one) for one in failed]
    hints = [check.hint for one in misfits for check in one.candidate.checks if check.outcome == "failed" and check.hint]
    fixes = [*(one.fix for one in failed), *(hint for hint in hints if not any(one.candidate.devices for one in misfits))]
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
        if failure.visible_hardware and failure.stage not in ("missing", "reuse"):
            raise plugin_error(failure, "its plugin to work, since the hardware is visible", f"{failure.fix}; {ways}")
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
    why = "the only one that can" if len(fits) == 1 else f"best of {len(fits)} by {_deciding(needs, fits[0], fits[1])}"
    if needs.platform is not None:
        return f"asked for as {needs.platform!r}" if "," not in needs.platform else f"of {needs.platform!r} {why}"
    return why


def _deciding(needs: Needs, better: Match, worse: Match) -> str:
    """The first criterion in which two matches differ."""
    pairs = zip(_CRITERIA, _rank(needs, better), _rank(needs, worse), strict=False)
    return next((name for name, left, right in pairs if left != right), "name of the distribution")


def _rejected_platforms(
    needs: Needs, fits: Sequence[Match], misfits: Sequence[Mismatch], failed: Sequence[Failed]
) -> tuple[RejectedCandidate, ...]:
    pairs = [(_label(one.candidate), f"ranked behind by {_deciding(needs, fits[0], one)}") for one in fits[1:]]
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
        if _rank(needs, other)[:_NAMES] == _rank(needs, best)[:_NAMES]:
            notes.append(f"tie with {name}, decided by name; --platform chooses")
        elif by_default and other.candidate.manifest.device_class == "accelerator":
            notes.append(f"the host ranks before {name} by {_deciding(needs, best, other)}; --platform chooses")
    return notes
