"""Entry point of the platform ``ascend``: manifest and hooks. Imports no torch; what needs it is imported in the hooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from vllm_ascend import platform, versions
from vllm_ascend import probe as probing
from vllm_ascend.backends import offers as backend
from vllm_ascend.backends.families import ARCHITECTURES
from vllm_core.api import (
    ConfigPatch,
    DeviceFacts,
    Full,
    Manifest,
    NotImplementedYet,
    Offer,
    Partial,
    ProbeReport,
    ProgramOffer,
    Support,
    Unsupported,
    hookimpl,
)

if TYPE_CHECKING:
    from vllm_core.api import Device

CLAIMS: Mapping[str, Support] = MappingProxyType(
    {
        "dtype.float32": Full(),
        "dtype.bfloat16": Full(),
        "dtype.float16": Full(),
        "kv_dtype.fp8": Unsupported("the chips compute in no 8-bit float"),
        "kv_dtype.int8": NotImplementedYet("attention reads the KV cache in the model's dtype"),
        "attention.decoder": Full(),
        "attention.sliding_window": Full(),
        "attention.soft_cap": Full(),
        "attention.sinks": NotImplementedYet("npu_fused_infer_attention_score has no sinks in its call"),
        "attention.encoder": Full(),
        "prefix_caching": Full(),
        "chunked_prefill": Full(),
        "sampling.device": Full(),
        "sampling.logprobs": Full(),
        "batch_invariant": NotImplementedYet("products depend on the number of rows"),
        "async_scheduling": Full(),
        "graphs": Full(),
        "sleep": NotImplementedYet("pools are not brought back yet"),
        "quantization.weight_only": Partial("float16 and bfloat16 models", cases=("int8_channel",)),
        "quantization.fp8_activation": Unsupported("the chips compute in no 8-bit float"),
        "parallel.tensor": Partial("written, and never run on two devices", cases=("one host",)),
        "peer_copy": NotImplementedYet("no peer copies yet"),
    }
)
NOTE = (
    "experimental, not run on hardware: every torch_npu call matches the vendor's schema; those with Meta kernels pass the "
    "vendor's shape inference; the plugin's logic is right against reference math; never executed on an NPU"
)


@hookimpl
def manifest() -> Manifest:
    """Static facts."""
    return Manifest(
        name="ascend",
        vendor="huawei",
        device_type="npu",
        api_version="0.2",
        core_range=">=0.1.0.dev0,<0.2",
        claims=CLAIMS,
        support_level="experimental",
        visible_devices_env=probing.VISIBLE,
        architectures=ARCHITECTURES,
        note=NOTE,
        companions=versions.MATRIX,
    )


@hookimpl
def probe() -> ProbeReport:
    """Look at driver, devices, CANN and torch_npu."""
    return probing.probe()


@hookimpl
def configure(config: Mapping[str, Any], explicit: frozenset[str]) -> ConfigPatch:
    """Step and graph sizes."""
    return platform.configure(config, explicit)


@hookimpl
def programs(device: DeviceFacts) -> Sequence[ProgramOffer]:
    """None of its own: core's program composes ops."""
    return ()


@hookimpl
def start(device: DeviceFacts) -> None:
    """Nothing to set before the device is opened."""


@hookimpl
def create_device(facts: DeviceFacts) -> Device:
    """Open the NPU; torch_npu is imported here, unless torch has loaded it itself."""
    from vllm_ascend.device import NpuDevice

    return NpuDevice(facts)


@hookimpl
def offers(device: DeviceFacts) -> Sequence[Offer]:
    """Vendor calls, for the families that they were written for."""
    return backend.offers(device)
