"""`Needs` in, `Plan` out: the two values between which the selector is a pure function.

Plain frozen dataclasses; a Plan is JSON in logs, errors, benchmark files and the conformance report, and is what
engine processes load. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from vllm_core.api import CallSite, DeviceFacts, KVGroupSpec, KVLayout, Offer, ProgramOffer, ProviderKind
from vllm_core.api.manifest import Check, Manifest

Stage = Literal[
    "foreign",
    "import",
    "hooks",
    "manifest",
    "version",
    "claims",
    "probe",
    "devices",
    "offers",
    "programs",
    "reuse",
    "missing",
    "absent",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What the model and the user ask for. Options left at None are the planner's to choose.

    `platform` may name several, in the user's order: ``"a,b"``. `alternatives` are the same needs at other dtypes, in order,
    for platforms that lack this one; empty where the user named the dtype. `weight_formats` are the quantised formats in the
    checkpoint, with the number of weights in each; `rounded_formats` those that the user has weights rounded
    to, of which the provider of linear must read one. `compiler` is a backend of torch.compile, empty for none.
    """

    model: str
    architecture: str
    dtype: str
    kv_dtype: str
    capabilities: frozenset[str]
    sites: tuple[CallSite, ...]
    kv_groups: tuple[KVGroupSpec, ...]
    track: str = "agnostic"
    platform: str | None = None
    device_ids: tuple[str, ...] | None = None
    block_size: int | None = None
    graphs: bool | None = None
    providers: Mapping[str, str] = field(default_factory=dict)
    denied_providers: frozenset[str] = frozenset()
    strict: bool = False
    allow_fallback: bool = False
    allow_host_ops: bool = False
    workers: int = 1
    alternatives: tuple[Needs, ...] = ()
    weight_formats: Mapping[str, int] = field(default_factory=dict)
    rounded_formats: tuple[str, ...] = ()
    program: str | None = None
    compiler: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One installed platform as seen here: loaded, probed, its offers (and those of kernel-only packages) collected.

    All devices have one architecture: a platform with two of them is two candidates, so that no offer is matched
    against a device it was not made for. `eager_full` is whether references may run there. `owners` names the distribution
    of each provider that is not the platform's own, with its version.
    """

    manifest: Manifest
    distribution: str
    version: str
    entry_point: str
    devices: tuple[DeviceFacts, ...]
    checks: tuple[Check, ...]
    offers: tuple[Offer, ...]
    eager_full: bool = True
    owners: Mapping[str, str] = field(default_factory=dict)
    programs: tuple[ProgramOffer, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A plugin that could not be used: which distribution, at which stage, why.

    Stage ``missing`` is hardware whose plugin is not installed, ``foreign`` another project's package of that name.
    `visible_hardware`: what the plugin is for was seen on this machine. `error` is the exception, in this process only.
    """

    distribution: str
    entry_point: str
    stage: Stage
    cause: str
    fix: str
    visible_hardware: bool = False
    error: BaseException | None = field(default=None, compare=False, repr=False)

    @property
    def key(self) -> str:
        """``distribution:entry_point``."""
        return f"{self.distribution}:{self.entry_point}"

    def __str__(self) -> str:
        return f"{self.key} failed at {self.stage}: {self.cause}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedCandidate:
    """A platform or provider that was not chosen, and the reason."""

    subject: str
    candidate: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """Provider of one call site. `fallbacks` are the next accepted ones, best first, as (provider, entry, kind).

    `formats` are the quantised ones that it reads weights in; what a fallback reads is decoded.
    """

    op: str
    role: str
    provider: str
    entry: str
    kind: ProviderKind
    fallbacks: tuple[tuple[str, str, ProviderKind], ...] = ()
    formats: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroupPlan:
    """One KV group with its layout; the number of blocks is set once memory has been measured.

    `role` is that of its call sites; `fallbacks` are the layouts of the providers that would take over, as (provider,
    layout).
    """

    spec: KVGroupSpec
    layout: KVLayout
    role: str = ""
    fallbacks: tuple[tuple[str, KVLayout], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Demotion:
    """A chosen provider that failed in warm-up or while serving, and what took its place."""

    op: str
    role: str
    provider: str
    replacement: str
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The decision, complete: workers load exactly this.

    Worker ``rank`` of `tensor_parallel` runs on ``devices[rank]``; `device` is the first. KV layouts are one worker's.
    `owners` are the distributions of those providers in it that are not the platform's own: kernel packages, reused ops.
    """

    platform: str
    distribution: str
    distribution_version: str
    entry_point: str
    support_level: str
    device: DeviceFacts
    model: str
    architecture: str
    track: str
    program: str
    dtype: str
    kv_dtype: str
    bindings: tuple[Binding, ...]
    kv_groups: tuple[KVGroupPlan, ...]
    graphs: bool
    tensor_parallel: int = 1
    devices: tuple[DeviceFacts, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    rejected: tuple[RejectedCandidate, ...] = ()
    demotions: tuple[Demotion, ...] = ()
    notes: tuple[str, ...] = ()
    owners: Mapping[str, str] = field(default_factory=dict)
    program_entry: str = ""
    """``module:callable`` of a program that the platform brings; empty for core's own."""
    compiler: str = ""
    """Backend of torch.compile that the model is compiled by; empty where it is not."""

    def binding(self, op: str, role: str) -> Binding | None:
        """The binding of a call site, if the plan has it."""
        return next((b for b in self.bindings if b.op == op and b.role == role), None)

    def device_of(self, rank: int) -> DeviceFacts:
        """The device of a worker."""
        return self.devices[rank] if self.devices else self.device

    def sharers(self, rank: int) -> int:
        """How many workers run on the device of worker ``rank``."""
        return max(1, [one.id for one in self.devices].count(self.device_of(rank).id))
