"""Capabilities: the vocabulary of claims, and the five values a claim can have.

A platform answers for every capability of the API version it was built for. The selector and the conformance
suite read the same answers. Whether a capability is required is part of its definition, not of the claim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Full:
    """Works in every case that the capability's definition names."""


@dataclass(frozen=True, slots=True)
class Versioned:
    """Works from a driver or runtime version on, e.g. ``Versioned("driver>=550")``."""

    since: str


@dataclass(frozen=True, slots=True)
class Partial:
    """Works in the named cases only, e.g. ``Partial("no kernel yet", cases=("bfloat16",))``."""

    reason: str
    cases: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NotImplementedYet:
    """Could work, nobody has written it; ``issue`` says where that is tracked."""

    issue: str


@dataclass(frozen=True, slots=True)
class Unsupported:
    """Cannot work on this hardware or by design; ``why`` says so to a user."""

    why: str


Support: TypeAlias = Full | Versioned | Partial | NotImplementedYet | Unsupported


def is_available(support: Support) -> bool:
    """Whether the claim says that at least some cases work."""
    return isinstance(support, (Full, Versioned, Partial))


def describe(support: Support) -> str:
    """One line for a person."""
    match support:
        case Full():
            return "full"
        case Versioned(since):
            return f"since {since}"
        case Partial(reason, cases):
            return f"partial ({', '.join(cases)}): {reason}"
        case NotImplementedYet(issue):
            return f"not implemented: {issue}"
        case Unsupported(why):
            return f"unsupported: {why}"


@dataclass(frozen=True, slots=True)
class Capability:
    """Definition of one capability: its name, the API version that brought it, and what it promises."""

    name: str
    since: tuple[int, int]
    required: bool
    doc: str


def _table(*rows: Capability) -> Mapping[str, Capability]:
    return MappingProxyType({row.name: row for row in rows})


V01, V02 = (0, 1), (0, 2)

CAPABILITIES: Mapping[str, Capability] = _table(
    Capability("dtype.float32", V01, False, "weights, activations and KV in float32"),
    Capability("dtype.bfloat16", V01, False, "weights, activations and KV in bfloat16"),
    Capability("dtype.float16", V01, False, "weights, activations and KV in float16"),
    Capability("kv_dtype.fp8", V01, False, "KV cache in fp8 (e4m3 or e5m2)"),
    Capability("kv_dtype.int8", V01, False, "KV cache in int8 with scales in the block"),
    Capability("attention.decoder", V01, True, "causal paged attention over mixed prefill and decode batches"),
    Capability("attention.sliding_window", V01, False, "sliding-window layers, blocks behind the window released"),
    Capability("attention.soft_cap", V01, False, "tanh soft cap on attention scores"),
    Capability("attention.sinks", V01, False, "learned attention sinks"),
    Capability("attention.encoder", V01, False, "bidirectional attention without a KV cache"),
    Capability("prefix_caching", V01, True, "full blocks shared between requests with equal prefixes"),
    Capability("chunked_prefill", V01, True, "a prompt computed in several steps, beside decoding requests"),
    Capability("sampling.device", V01, True, "sampling with all parameters of the engine, behind ops"),
    Capability("sampling.logprobs", V01, True, "log-probabilities of sampled and prompt tokens"),
    Capability("batch_invariant", V01, False, "equal tokens whatever else is in the batch, bit for bit"),
    Capability("async_scheduling", V01, False, "the next step is scheduled while this one runs"),
    Capability("graphs", V01, False, "steps captured once and replayed"),
    Capability("sleep", V01, False, "weights to host and KV dropped while the process stays"),
    Capability("quantization.weight_only", V01, False, "weights kept packed in a quantised format"),
    Capability("quantization.fp8_activation", V02, False, "inputs of products with fp8 weights rounded to fp8"),
    Capability("parallel.tensor", V01, False, "one model over several devices of one host"),
    Capability("peer_copy", V01, False, "copies between two devices of this type"),
)
"""All capabilities of the current API version, by name."""


def names_of(version: tuple[int, int]) -> frozenset[str]:
    """Names that a manifest of API ``version`` must answer for."""
    return frozenset(name for name, row in CAPABILITIES.items() if row.since <= version)
