"""A machine as `doctor --json` saves it, so that another one can plan for it.

Manifests, devices and checks are saved. Offers hold functions, so they are computed again from the plugins installed
where the planning happens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec

from vllm_core.api import Companion, Full, Manifest, NotImplementedYet, Partial, ProbeReport, Reuse, Unsupported, Versioned
from vllm_core.api.capability import Support
from vllm_core.api.manifest import Check, DeviceFacts
from vllm_core.errors import ConfigError
from vllm_core.registry.candidates import load_all, with_offers
from vllm_core.registry.discover import find
from vllm_core.registry.load import Loaded
from vllm_core.registry.plan import Candidate, Failed

FORMAT = 1
MAX_BYTES = 16 << 20

_SUPPORT: Mapping[str, type[Support]] = {
    "full": Full,
    "versioned": Versioned,
    "partial": Partial,
    "not_implemented": NotImplementedYet,
    "unsupported": Unsupported,
}
_UUID = re.compile(r"\b[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPlatform:
    """A candidate without its offers. `manifest` is plain data, claims tagged by their kind."""

    manifest: dict[str, Any]
    distribution: str
    version: str
    entry_point: str
    devices: tuple[DeviceFacts, ...]
    checks: tuple[Check, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFailure:
    """A `Failed` without its exception."""

    distribution: str
    entry_point: str
    stage: str
    cause: str
    fix: str
    visible_hardware: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One machine: its platforms, what failed, and what `doctor` found step by step."""

    format: int
    core_version: str
    host: Mapping[str, str]
    platforms: tuple[SavedPlatform, ...]
    failed: tuple[SavedFailure, ...]
    steps: Mapping[str, tuple[Check, ...]]


def manifest_data(manifest: Manifest) -> dict[str, Any]:
    """The manifest as the plain data that JSON has."""
    names = {kind: name for name, kind in _SUPPORT.items()}
    claims = {name: {"kind": names[type(one)], **msgspec.to_builtins(one)} for name, one in manifest.claims.items()}
    data = {f.name: getattr(manifest, f.name) for f in fields(manifest)}
    return msgspec.json.decode(msgspec.json.encode({**data, "claims": claims}), type=dict[str, Any])


def manifest_from_data(data: Mapping[str, Any]) -> Manifest:
    """The inverse of `manifest_data`. Raises msgspec.ValidationError or KeyError."""
    claims = {}
    for name, one in data["claims"].items():
        values = {key: value for key, value in one.items() if key != "kind"}
        claims[name] = msgspec.convert(values, type=_SUPPORT[one["kind"]])
    reuses = tuple(msgspec.convert(one, type=Reuse) for one in data.get("reuses", ()))
    companions = tuple(msgspec.convert(one, type=Companion) for one in data.get("companions", ()))
    architectures = tuple(data.get("architectures", ()))
    rest = {**data, "claims": {}, "architectures": architectures, "reuses": reuses, "companions": companions}
    known = {f.name for f in fields(Manifest)}
    return Manifest(**{**{key: value for key, value in rest.items() if key in known}, "claims": claims})


def save_platform(candidate: Candidate) -> SavedPlatform:
    """A candidate as it is saved."""
    return SavedPlatform(
        manifest=manifest_data(candidate.manifest),
        distribution=candidate.distribution,
        version=candidate.version,
        entry_point=candidate.entry_point,
        devices=candidate.devices,
        checks=candidate.checks,
    )


def save_failure(failed: Failed) -> SavedFailure:
    """A failure as it is saved."""
    return SavedFailure(**{f.name: getattr(failed, f.name) for f in fields(SavedFailure)})


def encode(snapshot: Snapshot, *, redact: bool = False) -> bytes:
    """The snapshot as JSON. `redact` takes out the host's name, the home folder and UUIDs."""
    data = msgspec.json.format(msgspec.json.encode(snapshot, order="deterministic"), indent=2)
    if not redact:
        return data
    text = _UUID.sub("<uuid>", data.decode("utf-8")).replace(str(Path.home()), "~")
    host = snapshot.host.get("node", "")
    return (re.sub(rf"\b{re.escape(host)}\b", "<host>", text) if host else text).encode("utf-8")


def redacted(snapshot: Snapshot) -> Snapshot:
    """The same without the host's name, the home folder and UUIDs."""
    return msgspec.json.decode(encode(snapshot, redact=True), type=Snapshot)


def read(path: Path) -> Snapshot:
    """Read a saved snapshot. Raises ConfigError."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise _unreadable(path, f"longer than {MAX_BYTES} bytes")
        snapshot = msgspec.json.decode(path.read_bytes(), type=Snapshot)
    except (OSError, msgspec.DecodeError) as error:
        raise _unreadable(path, str(error)) from error
    if snapshot.format != FORMAT:
        raise _unreadable(path, f"format {snapshot.format}")
    return snapshot


def recompute(snapshot: Snapshot, path: Path) -> tuple[list[Candidate], list[Failed]]:
    """Candidates for the saved machine, with the offers of the plugins installed here. Raises ConfigError."""
    platforms = {(saved.distribution, saved.entry_point) for saved in snapshot.platforms}
    wanted = {entry_point for _, entry_point in platforms}
    plugins = load_all(one for one in find() if one.platform in wanted)
    installed = {(one.found.distribution, one.found.entry_point): one for one in plugins.platforms}
    failed = plugins.failed + [_restore(one, path) for one in snapshot.failed]
    candidates: list[Candidate] = []
    for saved in snapshot.platforms:
        loaded = installed.get((saved.distribution, saved.entry_point))
        if loaded is None:
            failed.append(_absent(saved))
            continue
        report = ProbeReport(devices=saved.devices, checks=(*saved.checks, *_version_check(saved, loaded)))
        as_saved = Loaded(loaded.found, _manifest(saved, path), loaded.plugin, loaded.hooks)
        known = len(plugins.failed)
        candidates += with_offers(as_saved, report, plugins)
        failed += plugins.failed[known:]
    return candidates, failed


def _manifest(saved: SavedPlatform, path: Path) -> Manifest:
    try:
        return manifest_from_data(saved.manifest)
    except (KeyError, TypeError, AttributeError, msgspec.ValidationError) as error:
        raise _unreadable(path, f"manifest of {saved.distribution}: {error}") from error


def _restore(saved: SavedFailure, path: Path) -> Failed:
    try:
        return msgspec.convert(msgspec.to_builtins(saved), type=Failed)
    except msgspec.ValidationError as error:
        raise _unreadable(path, str(error)) from error


def _absent(saved: SavedPlatform) -> Failed:
    return Failed(
        distribution=saved.distribution,
        entry_point=saved.entry_point,
        stage="absent",
        cause=f"the saved machine has {saved.distribution} {saved.version}, which is not installed here",
        fix=f"install {saved.distribution} {saved.version} here too, with --no-deps if its dependencies cannot be",
        visible_hardware=bool(saved.devices),
    )


def _version_check(saved: SavedPlatform, loaded: Loaded) -> tuple[Check, ...]:
    if saved.version == loaded.found.version:
        return ()
    detail = f"saved {saved.version}, here {loaded.found.version}, whose offers are used"
    return (
        Check(name="plugin version", outcome="failed", detail=detail, hint=f"install {saved.distribution}=={saved.version}"),
    )


def _unreadable(path: Path, found: str) -> ConfigError:
    return ConfigError(
        "Saved probe cannot be read",
        on=str(path),
        found=found,
        expected=f"a file of format {FORMAT} that `vllm-core doctor --json FILE` wrote",
        fix="save it again on that machine with this version of vllm-core",
    )
