"""What a distribution says of itself (`Manifest`) and what it found on this machine (`ProbeReport`).

Plain dataclasses: they are read in milliseconds, without torch and without pydantic, and cross process borders
as JSON.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from vllm_core.api.capability import Support

SupportLevel = Literal["production", "beta", "experimental"]
MemoryKind = Literal["discrete", "unified", "host"]
Outcome = Literal["ok", "failed", "skipped"]
_NUMBERS = re.compile(r"\d+(\.\d+)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Companion:
    """Software of others that a platform runs on or can use, and the versions that it was made for.

    `name` is what the probe calls it, `versions` a range such as ``>=2.10,<3``, of which a found version is judged by its
    leading numbers (2.13.0 of ``2.13.0+x``). `architectures` are those that it concerns; empty: all. `optional`: without it,
    or with another version of it, the platform works without what it adds. `distribution` is its name for pip, where the
    probe reads its version from there; `plugin check` then shows the probe a version that is too old.
    """

    name: str
    versions: str
    architectures: tuple[str, ...] = ()
    optional: bool = False
    distribution: str = ""

    def __str__(self) -> str:
        concerned = f" for {', '.join(self.architectures)}" if self.architectures else ""
        return f"{self.name} {self.versions}{concerned}"

    def refusal(self, found: str) -> str:
        """What is wrong with a version, both of them named; empty where it is in the range."""
        from packaging.specifiers import SpecifierSet

        numbers = _NUMBERS.match(found)
        if numbers is not None and SpecifierSet(self.versions).contains(numbers[0]):
            return ""
        return f"found {self.name} {found}, expected {self}"


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
    this version passes, 0 to 5. `reuses` names platforms whose ops run here too. `companions` is the matrix of versions: the
    probe refuses by it (`Companion.refusal`).
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
    companions: tuple[Companion, ...] = ()


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
