"""Entry point of the platform ``cpu``: manifest and hooks. Imports no torch; what needs it is imported in the hooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from vllm_core.api import (
    ConfigPatch,
    DeviceFacts,
    Full,
    Manifest,
    Offer,
    Partial,
    ProbeReport,
    ProgramOffer,
    Support,
    Unsupported,
    hookimpl,
)
from vllm_cpu import platform
from vllm_cpu import probe as probing
from vllm_cpu.backends import generic, native, native_linear

if TYPE_CHECKING:
    from vllm_core.api import Device

_NATIVE = "where the package was built with its native library"

CLAIMS: Mapping[str, Support] = MappingProxyType(
    {
        "dtype.float32": Full(),
        "dtype.bfloat16": Full(),
        "dtype.float16": Full(),
        "kv_dtype.fp8": Partial(_NATIVE, cases=("e4m3", "e5m2")),
        "kv_dtype.int8": Partial(_NATIVE, cases=("a scale a token and head",)),
        "attention.decoder": Full(),
        "attention.sliding_window": Full(),
        "attention.soft_cap": Full(),
        "attention.sinks": Full(),
        "attention.encoder": Full(),
        "prefix_caching": Full(),
        "chunked_prefill": Full(),
        "sampling.device": Full(),
        "sampling.logprobs": Full(),
        "batch_invariant": Partial(
            "narrow products depend on the number of rows; a prompt cut into other chunks keeps its tokens but not the last "
            "bits of its log-probabilities",
            cases=("float32, equal chunks",),
        ),
        "async_scheduling": Partial("steps run on the engine's own thread, so nothing overlaps", cases=("one step ahead",)),
        "graphs": Full(),
        "sleep": Unsupported("weights already lie in host memory, there is nowhere to move them"),
        "quantization.weight_only": Partial(_NATIVE, cases=("GGUF formats", "int8_channel", "int4_group")),
        "quantization.fp8_activation": Unsupported("no CPU multiplies fp8; --activation int8 rounds inputs to eight bits"),
        "parallel.tensor": Full(),
        "peer_copy": Unsupported("one host is one device"),
    }
)


@hookimpl
def manifest() -> Manifest:
    """Static facts."""
    return Manifest(
        name="cpu",
        vendor="host",
        device_type="cpu",
        api_version="0.2",
        core_range=">=0.1.0.dev0,<0.2",
        claims=CLAIMS,
        support_level="beta",
        device_class="host",
        note="runs on any CPU that torch supports",
    )


@hookimpl
def probe() -> ProbeReport:
    """Look at the host."""
    return probing.probe()


@hookimpl
def configure(config: Mapping[str, Any], explicit: frozenset[str]) -> ConfigPatch:
    """Bound the KV cache, which would otherwise take most of the host's memory."""
    return platform.configure(config, explicit)


@hookimpl
def programs(device: DeviceFacts) -> Sequence[ProgramOffer]:
    """None of its own: core's program is the right one for a host."""
    return ()


@hookimpl
def start(device: DeviceFacts, sharers: int) -> None:
    """Set the number of threads."""
    platform.start(device, sharers)


@hookimpl
def create_device(facts: DeviceFacts) -> Device:
    """Open the host as a device."""
    from vllm_cpu.device import CpuDevice

    return CpuDevice(facts)


@hookimpl
def offers(device: DeviceFacts) -> Sequence[Offer]:
    """Ops that beat core's references; references serve the rest."""
    if device.device_type != "cpu":
        return ()
    return (*generic.offers(), *native.offers(), *native_linear.offers())
