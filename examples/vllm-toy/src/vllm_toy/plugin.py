"""Entry point of the platform ``toy``: manifest and hooks. Imports no torch; what needs it is imported in the hooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from vllm_core.api import (
    CAPABILITIES,
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
from vllm_toy import backend
from vllm_toy import probe as probing

if TYPE_CHECKING:
    from vllm_core.api import Device

ABSENT = {
    "kv_dtype.fp8": "the device computes in float32, bfloat16 and float16 alone",
    "kv_dtype.int8": "the device computes in float32, bfloat16 and float16 alone",
    "quantization.weight_only": "the device has no kernels for packed weights",
    "quantization.fp8_activation": "the device has no kernels for packed weights",
}
CLAIMS: Mapping[str, Support] = MappingProxyType(
    {
        **{name: Unsupported(ABSENT[name]) if name in ABSENT else Full() for name in CAPABILITIES},
        "batch_invariant": Partial("a prompt cut elsewhere sums in another order", cases=("float32, equal chunks",)),
    }
)


@hookimpl
def manifest() -> Manifest:
    """Static facts."""
    return Manifest(
        name="toy",
        vendor="example",
        device_type="toy",
        api_version="0.2",
        core_range=">=0.1.0.dev0,<0.2",
        claims=CLAIMS,
        visible_devices_env="VLLM_TOY_VISIBLE_DEVICES",
        architectures=("toy1",),
        note="simulated: for tests, and to be copied",
    )


@hookimpl
def probe() -> ProbeReport:
    """Look at this machine."""
    return probing.probe()


@hookimpl
def configure(config: Mapping[str, Any], explicit: frozenset[str]) -> ConfigPatch:
    """Nothing to change: core's defaults suit a device with memory of its own."""
    return ConfigPatch(changes={}, reasons={})


@hookimpl
def programs(device: DeviceFacts) -> Sequence[ProgramOffer]:
    """None of its own: core's program composes the ops below."""
    return ()


@hookimpl
def start(device: DeviceFacts) -> None:
    """Nothing to set: the device is compiled when it is opened."""


@hookimpl
def create_device(facts: DeviceFacts) -> Device:
    """Open the device in this process."""
    from vllm_toy.device import ToyDevice

    return ToyDevice(facts)


@hookimpl
def offers(device: DeviceFacts) -> Sequence[Offer]:
    """Ops with kernels of their own."""
    return backend.offers() if device.device_type == "toy" else ()
