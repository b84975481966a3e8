"""One candidate against the needs: `Match` with everything decided, or the reasons why not. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion

from vllm_core.api import DeviceFacts, Manifest, ProgramOffer, Versioned, is_available
from vllm_core.api.capability import describe
from vllm_core.api.ops import FP8_ACTIVATION
from vllm_core.api.quant import FP8_FORMATS
from vllm_core.registry.candidates import check_summary
from vllm_core.registry.negotiate import Negotiated, Unserved, negotiate
from vllm_core.registry.placement import place
from vllm_core.registry.plan import Binding, Candidate, KVGroupPlan, Needs, RejectedCandidate
from vllm_core.registry.programs import Brought, find_program
from vllm_core.registry.providers import Choice, bindings_of, choose, units_of
from vllm_core.registry.validate import claim

_KV_CAPABILITIES = {"fp8": "kv_dtype.fp8", "fp8_e4m3": "kv_dtype.fp8", "fp8_e5m2": "kv_dtype.fp8", "int8": "kv_dtype.int8"}
_KV_DTYPES = ("float32", "bfloat16", "float16", *_KV_CAPABILITIES)
SINCE = re.compile(r"(driver|runtime)\s*([<>=!~].*)")
"""What `Versioned.since` can say."""


@dataclass(frozen=True, slots=True)
class Match:
    """A candidate that can do it, with all that the Plan needs to know; `needs` are those at the dtype that it has."""

    needs: Needs
    candidate: Candidate
    devices: tuple[DeviceFacts, ...]
    bindings: tuple[Binding, ...]
    kv_groups: tuple[KVGroupPlan, ...]
    graphs: bool
    reasons: tuple[tuple[str, str], ...]
    rejected: tuple[RejectedCandidate, ...]
    program: ProgramOffer | None = None

    @property
    def device(self) -> DeviceFacts:
        """The first worker's."""
        return self.devices[0]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A candidate that cannot, and every reason."""

    candidate: Candidate
    reasons: tuple[str, ...]


def match(needs: Needs, candidate: Candidate) -> Match | Mismatch:
    """Match at the dtype of the needs; where the platform lacks it, at the first alternative that it has."""
    outcome = _match(needs, candidate)
    if isinstance(outcome, Match) or not lacks_dtype(needs, candidate):
        return outcome
    why = f"{needs.dtype} is {describe(claim(candidate.manifest, f'dtype.{needs.dtype}'))}"
    for other in needs.alternatives:
        found = _match(other, candidate)
        if isinstance(found, Match):
            return replace(
                found, reasons=(("dtype", f"{other.dtype}: the checkpoint's {why}; --dtype chooses"), *found.reasons)
            )
    return outcome


def lacks_dtype(needs: Needs, candidate: Candidate) -> bool:
    """Whether the platform's claims, or its device's driver, rule the dtype out."""
    support = claim(candidate.manifest, f"dtype.{needs.dtype}")
    if isinstance(support, Versioned):
        return not any(_is_since(support.since, device) for device in candidate.devices)
    return not is_available(support)


def _match(needs: Needs, candidate: Candidate) -> Match | Mismatch:
    """Check devices, claims, graphs, providers and KV groups. The cheap checks report all that is wrong at once."""
    devices = _devices(needs, candidate)
    if isinstance(devices, str):
        absent = _claims(needs, candidate.manifest, candidate.devices) if candidate.devices else []
        return Mismatch(candidate, (devices, *absent))
    device = devices[0]
    wrong = [
        *_claims(needs, candidate.manifest, devices),
        *_architecture(candidate.manifest, device),
        *_graphs(needs, candidate),
    ]
    if wrong:
        return Mismatch(candidate, tuple(wrong))
    brought = find_program(needs, candidate, device)
    if isinstance(brought, Brought) and brought.why is not None:
        return _with_program(needs, candidate, devices, brought, brought.why)
    if needs.program is not None and not isinstance(brought, Brought) and brought.reasons:
        return Mismatch(candidate, tuple(f"program {one.candidate}: {one.reason}" for one in brought.reasons))
    plain = [choose(unit, candidate, needs) for unit in units_of(needs.sites) if not unit.is_kv]
    kv = negotiate(needs, candidate)
    if isinstance(kv, Negotiated):
        parts = [site for group in kv.groups for site in group.choice.parts()]
        plain += [choose(unit, candidate, needs) for unit in units_of(parts)]
    spared = [one for one in plain if not one.accepted and not one.unit.is_needed(needs)]
    plain = [one for one in plain if one not in spared]
    unserved = [reason for choice in plain for reason in choice.why_unserved()]
    unserved += _cannot_round(needs, plain)
    if unserved or isinstance(kv, Unserved):
        lacking = (*unserved, *(kv.reasons if isinstance(kv, Unserved) else ()))
        if isinstance(brought, Brought):
            return _with_program(needs, candidate, devices, brought, f"core's own cannot run here: {lacking[0]}")
        return Mismatch(candidate, (*lacking, *(f"program {one.candidate}: {one.reason}" for one in brought.reasons)))
    every = [*plain, *(group.choice for group in kv.groups)]
    return Match(
        needs=needs,
        candidate=candidate,
        devices=devices,
        bindings=tuple(binding for choice in every for binding in bindings_of(choice, needs)),
        kv_groups=tuple(group.plan(needs) for group in kv.groups),
        graphs=needs.graphs is not False and _claims_graphs(candidate),
        reasons=(
            *kv.reasons,
            ("graphs", _graph_reason(needs, candidate)),
            *_weight_reason(needs, every),
            *_input_reason(needs, every),
            *map(_provider_reason, every),
        ),
        rejected=(
            *(one for choice in (*every, *spared) for one in choice.rejected),
            *(() if isinstance(brought, Brought) else brought.reasons),
        ),
    )


def _with_program(needs: Needs, candidate: Candidate, devices: tuple[DeviceFacts, ...], brought: Brought, why: str) -> Match:
    """A program of the platform runs the model: it has its own code instead of call sites, and its own graphs."""
    return Match(
        needs=needs,
        candidate=candidate,
        devices=devices,
        bindings=(),
        kv_groups=brought.kv_groups,
        graphs=False,
        reasons=(("program", f"{brought.offer.name}: {why}"),),
        rejected=(),
        program=brought.offer,
    )


def kv_capability(dtype: str) -> str:
    """The capability that a KV dtype needs."""
    return _KV_CAPABILITIES.get(dtype, f"dtype.{dtype}")


def _devices(needs: Needs, candidate: Candidate) -> tuple[DeviceFacts, ...] | str:
    """The device of each worker: those that the user named, else those with the most memory; or why there are too few."""
    if not candidate.devices:
        return f"no device: {check_summary(candidate.checks)}"
    devices = [one for one in candidate.devices if needs.device_ids is None or one.id in needs.device_ids]
    if not devices:
        wanted, here = ", ".join(needs.device_ids or ()), ", ".join(one.id for one in candidate.devices)
        return f"device ids: wanted {wanted}, found {here}"
    return place(needs, devices)


def _claims(needs: Needs, manifest: Manifest, devices: Sequence[DeviceFacts]) -> list[str]:
    """What is needed and not claimed, or not for the driver of one of the devices."""
    reasons = []
    names = needs.capabilities | {f"dtype.{needs.dtype}"}
    if needs.kv_groups:
        names |= {kv_capability(needs.kv_dtype)}
    for name in sorted(names):
        support = claim(manifest, name)
        if not is_available(support):
            reasons.append(f"{name} is {describe(support)}{_accepted_kv(name, needs, manifest)}")
        elif isinstance(support, Versioned):
            old = [one for one in devices if not _is_since(support.since, one)]
            reasons += [f"{name} needs {support.since}, found {had}" for had in dict.fromkeys(map(_versions, old))]
    return reasons


def _versions(device: DeviceFacts) -> str:
    return f"driver {device.driver_version or 'unknown'}, runtime {device.runtime_version or 'unknown'}"


def _accepted_kv(name: str, needs: Needs, manifest: Manifest) -> str:
    if not needs.kv_groups or name != kv_capability(needs.kv_dtype):
        return ""
    accepted = [dtype for dtype in _KV_DTYPES if is_available(claim(manifest, kv_capability(dtype)))]
    return f" (KV dtype: wanted {needs.kv_dtype}, accepted {', '.join(accepted) or 'none'})"


def _is_since(since: str, device: DeviceFacts) -> bool:
    """Evaluate ``driver>=550``. A condition or a version that cannot be read does not hold."""
    parts = SINCE.fullmatch(since.strip())
    if parts is None:
        return False
    version = device.driver_version if parts[1] == "driver" else device.runtime_version
    try:
        return SpecifierSet(parts[2]).contains(version, prereleases=True)
    except (InvalidSpecifier, InvalidVersion):
        return False


def _architecture(manifest: Manifest, device: DeviceFacts) -> list[str]:
    if not manifest.architectures or device.architecture in manifest.architectures:
        return []
    return [f"kernels are built for {', '.join(manifest.architectures)}, found {device.architecture}"]


def _claims_graphs(candidate: Candidate) -> bool:
    return is_available(claim(candidate.manifest, "graphs"))


def _graphs(needs: Needs, candidate: Candidate) -> list[str]:
    if needs.graphs is not True or _claims_graphs(candidate):
        return []
    return [f"graphs were asked for, and are {describe(claim(candidate.manifest, 'graphs'))}"]


def _graph_reason(needs: Needs, candidate: Candidate) -> str:
    if needs.graphs is not None:
        return "as the user asked"
    return f"the platform's claim: {describe(claim(candidate.manifest, 'graphs'))}"


def _cannot_round(needs: Needs, choices: Sequence[Choice]) -> list[str]:
    """Why weights cannot be rounded while loading, where the user asks for it."""
    linear = next((one.best for one in choices if one.unit.family == "linear" and one.accepted), None)
    if not needs.rounded_formats or linear is None or linear.formats & set(needs.rounded_formats):
        return []
    read = ", ".join(sorted(linear.formats))
    return [f"--quantization: wanted one of {', '.join(needs.rounded_formats)}, {linear.provider} reads {read}"]


def _weight_reason(needs: Needs, choices: Sequence[Choice]) -> list[tuple[str, str]]:
    """Which quantised weights stay packed, and what it costs that others are decoded."""
    linear = next((one.best for one in choices if one.unit.family == "linear" and one.accepted), None)
    if linear is not None and needs.rounded_formats:
        to = next((name for name in needs.rounded_formats if name in linear.formats), "none")
        return [("weights", f"rounded to {to} while loading, as the user asked")]
    if not needs.weight_formats or linear is None:
        return []
    item = 4 if needs.dtype == "float32" else 2
    kept = [name for name in needs.weight_formats if name in linear.formats]
    decoded = {name: count * item >> 20 for name, count in needs.weight_formats.items() if name not in linear.formats}
    lines = [f"{', '.join(kept)} stay packed"] if kept else []
    lines += [
        f"{name} decoded to {needs.dtype}, {size} MiB: {linear.provider} does not read it" for name, size in decoded.items()
    ]
    return [("weights", "; ".join(lines))]


def _input_reason(needs: Needs, choices: Sequence[Choice]) -> list[tuple[str, str]]:
    """Inputs of which products are rounded to fp8, and how their provider does it."""
    linear = next((one.best for one in choices if one.unit.family == "linear" and one.accepted), None)
    if linear is None or not any(FP8_ACTIVATION in site.features for site in needs.sites):
        return []
    formats = [name for name in needs.rounded_formats or needs.weight_formats if name in FP8_FORMATS & linear.formats]
    how = f"rounded to fp8 for weights in {', '.join(formats)}{f', {linear.note}' if linear.note else ''}"
    return [("inputs", f"{how}; products with others, and experts, are exact")]


def _provider_reason(choice: Choice) -> tuple[str, str]:
    why = "forced" if choice.forced else f"first of {len(choice.accepted)} accepted, {len(choice.rejected)} rejected"
    note = f"; {choice.best.note}" if choice.best.note and choice.unit.family != "linear" else ""
    return f"provider of {choice.unit.name}", f"{choice.best.provider}: {why}{note}"
