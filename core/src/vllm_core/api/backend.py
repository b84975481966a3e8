"""Offers of ops, and the question that selection asks of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from vllm_core.api.kv import KVGroupSpec, KVLayout

ProviderKind = Literal["kernel", "vendor", "reference", "host"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSite:
    """One place in the model or engine that calls an op: the op's name and what is particular about this place.

    `role` names the place (``"attention.full"``, ``"mlp.down"``, ``"tail"``); `group` the KV group, if any.
    `features` are names from the op's specification that this place uses (``"sliding_window"``, ``"soft_cap"``).
    """

    op: str
    role: str
    dtype: str
    group: int | None = None
    kv_dtype: str | None = None
    head_size: int | None = None
    tokens_per_block: int | None = None
    format: str = "plain"
    features: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Accepted:
    """The offer can serve the call site."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """The offer cannot serve the call site: which need, what was wanted, what the offer supports."""

    need: str
    wanted: str
    supported: str

    def __str__(self) -> str:
        return f"{self.need}: wanted {self.wanted}, supported {self.supported}"


Verdict: TypeAlias = Accepted | Rejected


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Ops of one family (or one op without a family) that a provider implements under the same conditions.

    `ops` maps op name to ``"module:callable"``, imported when the call site is bound. An unknown op name is an
    error when the offer is collected. None for a set means: any value. `priority` orders offers of one platform,
    higher first; a reference has the lowest.
    `kv_layout(group, dtype, tokens_per_block)` is needed for the family ``kv`` and must be pure.
    `accepts`, if given, is asked after the declared sets have accepted; it must be pure. `note` is what a user should know of
    how it serves, for the Plan.
    """

    provider: str
    ops: Mapping[str, str]
    kind: ProviderKind = "kernel"
    dtypes: frozenset[str] | None = None
    kv_dtypes: frozenset[str] | None = None
    head_sizes: frozenset[int] | None = None
    block_sizes: frozenset[int] | None = None
    formats: frozenset[str] = frozenset({"plain"})
    features: frozenset[str] = frozenset()
    architectures: frozenset[str] | None = None
    priority: int = 0
    op_versions: Mapping[str, int] = field(default_factory=dict)
    kv_layout: Callable[[KVGroupSpec, str, int], KVLayout] | None = None
    accepts: Callable[[CallSite], Verdict] | None = None
    note: str = ""

    def judge(self, site: CallSite, architecture: str) -> Verdict:
        """Match the declared sets against the call site, then ask `accepts`."""
        wanted: tuple[tuple[str, object, frozenset[object] | None], ...] = (
            ("dtype", site.dtype, _any(self.dtypes)),
            ("kv dtype", site.kv_dtype, _any(self.kv_dtypes)),
            ("head size", site.head_size, _any(self.head_sizes)),
            ("block size", site.tokens_per_block, _any(self.block_sizes)),
            ("format", site.format, _any(self.formats)),
            ("architecture", architecture, _any(self.architectures)),
        )
        for need, value, supported in wanted:
            if value is not None and supported is not None and value not in supported:
                return Rejected(need, str(value), _listing(supported))
        missing = site.features - self.features
        if missing:
            return Rejected("feature", _listing(frozenset(missing)), _listing(frozenset(self.features)))
        return self.accepts(site) if self.accepts is not None else Accepted()


def _any(values: frozenset[str] | frozenset[int] | None) -> frozenset[object] | None:
    return None if values is None else frozenset(values)


def _listing(values: frozenset[object]) -> str:
    return ", ".join(sorted(map(str, values))) or "none"
