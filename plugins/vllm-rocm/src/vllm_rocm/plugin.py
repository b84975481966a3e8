"""Entry point of the platform ``rocm``: manifest and hooks. Imports no torch; what needs it is imported in the hooks."""

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
from vllm_rocm import platform, versions
from vllm_rocm import probe as probing
from vllm_rocm.backends import offers as backend
from vllm_rocm.backends.families import ARCHITECTURES

if TYPE_CHECKING:
    from vllm_core.api import Device

STATEMENT = (
    "experimental, not run on hardware: kernels compile to AMD machine code within LDS and register limits for these "
    "architectures; the algorithm is verified in the interpreter; never executed on AMD hardware"
)

CODES = Partial(
    "beyond that registers spill",
    cases=("blocks of 16 tokens or more", "on RDNA bfloat16 and float16", "on gfx1100 heads up to 64"),
)

CLAIMS: Mapping[str, Support] = MappingProxyType(
    {
        "dtype.float32": Full(),
        "dtype.bfloat16": Full(),
        "dtype.float16": Full(),
        "kv_dtype.fp8": CODES,
        "kv_dtype.int8": CODES,
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
        "sleep": NotImplementedYet("pools are not brought back yet"),
        "quantization.weight_only": Partial(
            "registers spill on CDNA in int4_group, and on RDNA for models in float32; q8_0 and q4_0 are predicted slower than "
            "bfloat16 on CDNA",
            cases=("int8_channel", "fp8", "q8_0, q4_0 and int4_group on RDNA"),
        ),
        "quantization.fp8_activation": NotImplementedYet("products widen weights in fp8, and are exact"),
        "parallel.tensor": Partial("written, and never run on two devices", cases=("one host",)),
        "peer_copy": NotImplementedYet("no peer copies yet"),
    }
)


@hookimpl
def manifest() -> Manifest:
    """Static facts."""
    return Manifest(
        name="rocm",
        vendor="amd",
        device_type="hip",
        api_version="0.2",
        core_range=">=0.1.0.dev0,<0.2",
        claims=CLAIMS,
        support_level="experimental",
        visible_devices_env="HIP_VISIBLE_DEVICES",
        architectures=ARCHITECTURES,
        note=STATEMENT,
        companions=versions.MATRIX,
    )


@hookimpl
def probe() -> ProbeReport:
    """Look at driver, device files, runtime and torch's build."""
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
    from vllm_rocm.device import RocmDevice

    return RocmDevice(facts)


@hookimpl
def offers(device: DeviceFacts) -> Sequence[Offer]:
    """Kernels by architecture family."""
    return backend.offers(device)
