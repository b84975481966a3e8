"""Entry point of the platform ``toy-static``: manifest and hooks. Imports no torch; what needs it is imported in the hooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from vllm_core.api import (
    CAPABILITIES,
    Check,
    ConfigPatch,
    DeviceFacts,
    Full,
    Manifest,
    Offer,
    ProbeReport,
    ProgramOffer,
    Support,
    Unsupported,
    hookimpl,
)
from vllm_toy_static import platform

if TYPE_CHECKING:
    from vllm_core.api import Device

PRESENT = {
    "dtype.float32",
    "attention.decoder",
    "prefix_caching",
    "chunked_prefill",
    "sampling.device",
    "sampling.logprobs",
    "async_scheduling",
}
CLAIMS: Mapping[str, Support] = MappingProxyType(
    {name: Full() if name in PRESENT else Unsupported("the compiled step has no such part") for name in CAPABILITIES}
)


@hookimpl
def manifest() -> Manifest:
    """Static facts."""
    return Manifest(
        name="toy-static",
        vendor="example",
        device_type="toy-static",
        api_version="0.1",
        core_range=">=0.1.0.dev0,<0.2",
        claims=CLAIMS,
        architectures=("static1",),
        note="simulated: compiled steps of fixed sizes in another process",
    )


@hookimpl
def probe() -> ProbeReport:
    """The device is wherever Python runs. `eager` tells the planner that no reference may run on it."""
    facts = DeviceFacts(
        id="0",
        name="Toy compiler",
        device_type="toy-static",
        architecture="static1",
        memory_kind="discrete",
        memory_bytes=platform.MEMORY_BYTES,
        properties={"eager": "none"},
    )
    sizes = f"{len(platform.ROWS) * len(platform.TOKENS)} compiled sizes"
    return ProbeReport(devices=(facts,), checks=(Check(name="compiler", outcome="ok", detail=sizes),))


@hookimpl
def configure(config: Mapping[str, Any], explicit: frozenset[str]) -> ConfigPatch:
    """Keep steps within the largest compiled size."""
    return platform.configure(config, explicit)


@hookimpl
def programs(device: DeviceFacts) -> Sequence[ProgramOffer]:
    """The program that hands steps to the device's process."""
    return (platform.PROGRAM,)


@hookimpl
def start(device: DeviceFacts) -> None:
    """Nothing to set: the device's process starts with the program."""


@hookimpl
def create_device(facts: DeviceFacts) -> Device:
    """Open the account of the device's memory."""
    from vllm_toy_static.device import StaticDevice

    return StaticDevice(facts)


@hookimpl
def offers(device: DeviceFacts) -> Sequence[Offer]:
    """No ops: nothing runs outside compiled steps."""
    return ()
