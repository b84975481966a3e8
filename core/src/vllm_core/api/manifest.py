"""What a distribution says of itself (`Manifest`) and what it found on this machine (`ProbeReport`).

Plain dataclasses: they are read in milliseconds, without torch and without pydantic, and cross process borders
as JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from vllm_core.api.capability import Support

SupportLevel = Literal["production", "beta", "experimental"]
MemoryKind = Literal["discrete", "unified", "host"]
Outcome = Literal["ok", "failed", "skipped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reuse:
    """Ops of another distribution's platform that run on this one's devices too: hardware that speaks its dialect.

    `platform` is the other's name. `architectures` maps an architecture of this platform to the one whose kernels run on
    it; devices of others get nothing. `versions` is the range of the other distribution that was tried. `ops` limits what
    is taken; None: all. Own ops go before reused ones, and the Plan says whose each is.
    """

    platform: str
    architectures: Mapping[str, str]
    versions: str = ""
    ops: frozenset[str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Static facts of a platform, the same on every machine.

    `claims` answers for every capability of `api_version`; a missing name is an error, a name that core does not
    know is ignored by older cores. `architectures` are those that the distribution's kernels were built for;
    empty means that it ships no compiled kernels. `conformance_level` is the highest level of the conformance suite that
    this version passes, 0 to 5. `reuses` names platforms whose ops run here too.
    """

    name: str
    vendor: str
    device_type: str
    api_version: str
    core_range: str
    claims: Mapping[str, Support]
    support_level: SupportLevel = "experimental"
    visible_devices_env: str | None = None
    architectures: tuple[str, ...] = ()
    device_class: Literal["accelerator", "host"] = "accelerator"
    note: str = ""
    conformance_level: int = 0
    reuses: tuple[Reuse, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that a probe looked at: its outcome in words, and a hint for a person when it failed."""

    name: str
    outcome: Outcome
    detail: str
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """One device as the probe saw it. `id` is opaque: an index, a UUID, a MIG id.

    `max_workers` is how many workers of one model may share it: 1, unless the device is a host whose cores they divide.
    """

    id: str
    name: str
    device_type: str
    architecture: str
    memory_kind: MemoryKind
    memory_bytes: int
    driver_version: str = ""
    runtime_version: str = ""
    links: Mapping[str, str] = field(default_factory=dict)
    properties: Mapping[str, str] = field(default_factory=dict)
    max_workers: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    """Result of the `probe` hook. No devices means: this platform cannot run here, and the checks say why."""

    devices: tuple[DeviceFacts, ...]
    checks: tuple[Check, ...]

    @property
    def failures(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if check.outcome == "failed")
