"""Everything that core asks of one plugin, as a list of checks for its author."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

from vllm_core.api import CAPABILITIES, DeviceFacts, ProbeReport, is_available
from vllm_core.api.capability import describe
from vllm_core.api.manifest import Check, Manifest
from vllm_core.api.ops import OPS
from vllm_core.errors import PluginError
from vllm_core.registry.discover import Found
from vllm_core.registry.load import Loaded, attempt, describe_error, load
from vllm_core.registry.plan import Failed
from vllm_core.registry.probe import probe
from vllm_core.registry.validate import claim


def check_plugin(found: Found, environ: Mapping[str, str]) -> tuple[Check, ...]:
    """Load, required claims, probe (not from the cache), offers of each device, and that their modules exist."""
    loaded = load(found)
    if isinstance(loaded, Failed):
        return (_failed(loaded),)
    checks = [Check(name="load", outcome="ok", detail="import, hooks, manifest and claims are in order")]
    if loaded.manifest is None:
        checks.append(
            Check(name="offers", outcome="skipped", detail=f"kernels for {found.platform} are asked with its devices")
        )
        return tuple(checks)
    checks += _required(loaded.manifest)
    report = probe(loaded, environ=environ, use_cache=False)
    if isinstance(report, Failed):
        return (*checks, _failed(report))
    detail = f"{len(report.devices)} devices, {len(report.checks)} checks, {len(report.failures)} failed"
    checks.append(Check(name="probe", outcome="ok", detail=detail))
    checks += [Check(name=f"probe: {one.name}", outcome="skipped", detail=one.detail, hint=one.hint) for one in report.failures]
    return (*checks, *_offers(loaded, report))


def _failed(failed: Failed) -> Check:
    return Check(name=failed.stage, outcome="failed", detail=failed.cause, hint=failed.fix)


def _required(manifest: Manifest) -> list[Check]:
    """Capabilities that every platform must have."""
    hint = "the engine cannot run without it"
    return [
        Check(name=f"claim {name}", outcome="failed", detail=f"required, and {describe(claim(manifest, name))}", hint=hint)
        for name, capability in CAPABILITIES.items()
        if capability.required and not is_available(claim(manifest, name))
    ]


def _offers(loaded: Loaded, report: ProbeReport) -> list[Check]:
    devices: dict[str, DeviceFacts] = {}
    for device in report.devices:
        devices.setdefault(device.architecture, device)
    if not devices:
        return [Check(name="offers", outcome="skipped", detail="no device to ask for")]
    checks = []
    for architecture, device in devices.items():
        try:
            offers = loaded.offers(device)
        except PluginError as error:
            checks.append(Check(name=f"offers for {architecture}", outcome="failed", detail=error.found, hint=error.fix))
            continue
        entries = {(op, entry) for offer in offers for op, entry in offer.ops.items()}
        ops = {op for op, _ in entries}
        left = f"; left to references: {', '.join(sorted(set(OPS) - ops))}" if set(OPS) - ops else ""
        checks.append(Check(name=f"offers for {architecture}", outcome="ok", detail=f"{len(ops)} of {len(OPS)} ops{left}"))
        checks += _modules(entries)
    return checks


def _modules(entries: set[tuple[str, str]]) -> list[Check]:
    """Entries whose module does not exist. The modules themselves are not imported: kernels may need the device."""
    checks = []
    for op, entry in sorted(entries):
        module = entry.partition(":")[0]
        spec = attempt(lambda name=module: find_spec(name))  # type: ignore[misc]
        if spec is None or isinstance(spec, Exception):
            why = describe_error(spec) if isinstance(spec, Exception) else "no such module"
            checks.append(Check(name=f"op {op}", outcome="failed", detail=f"{entry}: {why}", hint="correct the entry"))
    return checks
