"""Entry point of the platform ``cuda``: manifest and hooks. Imports no torch; what needs it is imported in the hooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

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
    hookimpl,
)
from vllm_cuda import platform
from vllm_cuda import probe as probing
from vllm_cuda.backends import offers as backend
from vllm_cuda.backends.families import ARCHITECTURES

if TYPE_CHECKING:
    from vllm_core.api import Device

INTERPRETED = "checked in Triton's interpreter and by compilation, not yet on a GPU"

CLAIMS: Mapping[str, Support] = MappingProxyType(
    {
        "dtype.float32": Full(),
        "dtype.bfloat16": Full(),
        "dtype.float16": Full(),
        "kv_dtype.fp8": Partial(f"fp8_e5m2: {INTERPRETED}", cases=("fp8", "fp8_e4m3", "fp8_e5m2")),
        "kv_dtype.int8": Full(),
        "attention.decoder": Full(),
        "attention.sliding_window": Full(),
        "attention.soft_cap": Full(),
        "attention.sinks": Full(),
        "attention.encoder": Full(),
        "prefix_caching": Full(),
        "chunked_prefill": Full(),
        "sampling.device": Full(),
        "sampling.logprobs": Full(),
        "batch_invariant": NotImplementedYet("products and split keys depend on the number of rows"),
        "async_scheduling": Full(),
        "graphs": Full(),
        "sleep": Full(),
        "quantization.weight_only": Partial(
            f"experts: {INTERPRETED}", cases=("int4_group", "int8_channel", "fp8", "q8_0", "q4_0")
        ),
        "quantization.fp8_activation": Partial(
            "run on sm_90; weights in squares there alone", cases=("sm_89", "sm_90", "sm_100", "sm_103")
        ),
        "parallel.tensor": Full(),
        "peer_copy": Full(),
    }
)


@hookimpl
def manifest() -> Manifest:
    """Static facts."""
    return Manifest(
        name="cuda",
        vendor="nvidia",
        device_type="cuda",
        api_version="0.2",
        core_range=">=0.1.0.dev0,<0.2",
        claims=CLAIMS,
        support_level="beta",
        visible_devices_env="CUDA_VISIBLE_DEVICES",
        architectures=ARCHITECTURES,
        note="run on an H200 (sm_90), of quantised weights none of experts; kernels for the other architectures compile, and "
        "have not run",
    )


@hookimpl
def probe() -> ProbeReport:
    """Look at driver, devices and torch's build."""
    return probing.probe()


@hookimpl
def configure(config: Mapping[str, Any], explicit: frozenset[str]) -> ConfigPatch:
    """Step and graph sizes."""
    return platform.configure(config, explicit)


@hookimpl
def programs(device: DeviceFacts) -> Sequence[ProgramOffer]:
    """None of its own: core's program captures steps."""
    return ()


@hookimpl
def start(device: DeviceFacts) -> None:
    """Choose block sizes."""
    platform.start(device)


@hookimpl
def create_device(facts: DeviceFacts) -> Device:
    """Open the GPU."""
    from vllm_cuda.device import CudaDevice

    return CudaDevice(facts)


@hookimpl
def offers(device: DeviceFacts) -> Sequence[Offer]:
    """Kernels by architecture family."""
    return backend.offers(device)
