"""The public contract between vllm-core and hardware plugins.

A plugin imports this package and nothing else of core. Importing it loads neither torch nor pydantic.
`hooks` holds the hooks, `ops` the registry of ops, `batch` and `program` one engine step.
"""

from __future__ import annotations

from vllm_core.api.backend import Accepted, CallSite, Offer, ProviderKind, Rejected, Verdict
from vllm_core.api.batch import BatchState, Logprobs, StepInputs
from vllm_core.api.capability import (
    CAPABILITIES,
    Capability,
    Full,
    NotImplementedYet,
    Partial,
    Support,
    Unsupported,
    Versioned,
    is_available,
)
from vllm_core.api.device import POOLS, Communicator, Device, Eager, Event, Graph, MemoryStats, Pool
from vllm_core.api.hooks import (
    ENTRY_POINT_GROUP,
    PLATFORM_HOOKS,
    PROJECT,
    BackendSpec,
    ConfigPatch,
    DeviceSpec,
    PlatformSpec,
    hookimpl,
    hookspec,
)
from vllm_core.api.kv import KVGroupSpec, KVLayout
from vllm_core.api.manifest import Check, Companion, DeviceFacts, Manifest, ProbeReport, Reuse
from vllm_core.api.ops import OPS
from vllm_core.api.opspec import OpSpec, Tolerance, load_entry
from vllm_core.api.program import (
    Executable,
    HostLogprobs,
    ProgramBudget,
    ProgramOffer,
    StepDelta,
    StepHandle,
    StepKey,
    StepProgram,
    StepResult,
)
from vllm_core.api.quant import FORMATS, PLAIN, STACK, QuantFormat, QuantStack, QuantTensor, Weight
from vllm_core.api.stack import DecoderLayer, DecoderLayers
from vllm_core.api.version import API_VERSION
from vllm_core.errors import MemoryBudgetError, UnsupportedError

__all__ = [
    "API_VERSION",
    "Accepted",
    "BackendSpec",
    "BatchState",
    "CAPABILITIES",
    "CallSite",
    "Capability",
    "Check",
    "Communicator",
    "Companion",
    "ConfigPatch",
    "DecoderLayer",
    "DecoderLayers",
    "Device",
    "DeviceFacts",
    "DeviceSpec",
    "ENTRY_POINT_GROUP",
    "Eager",
    "Event",
    "Executable",
    "FORMATS",
    "Full",
    "Graph",
    "HostLogprobs",
    "KVGroupSpec",
    "KVLayout",
    "Logprobs",
    "Manifest",
    "MemoryBudgetError",
    "MemoryStats",
    "NotImplementedYet",
    "OPS",
    "Offer",
    "OpSpec",
    "PLATFORM_HOOKS",
    "POOLS",
    "PLAIN",
    "PROJECT",
    "Partial",
    "PlatformSpec",
    "Pool",
    "ProbeReport",
    "ProgramBudget",
    "ProgramOffer",
    "ProviderKind",
    "QuantFormat",
    "QuantStack",
    "QuantTensor",
    "Rejected",
    "Reuse",
    "STACK",
    "StepDelta",
    "StepHandle",
    "StepInputs",
    "StepKey",
    "StepProgram",
    "StepResult",
    "Support",
    "Tolerance",
    "Unsupported",
    "UnsupportedError",
    "Verdict",
    "Versioned",
    "Weight",
    "hookimpl",
    "hookspec",
    "is_available",
    "load_entry",
]
