"""Entry point of the platform ``xpu``: manifest and hooks. Imports no torch; what needs it is imported in the hooks."""

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
    Unsupported,
    hookimpl,
)
from vllm_xpu import platform, versions
from vllm_xpu import probe as probing
from vllm_xpu.backends import offers as backend
from vllm_xpu.backends.families import ARCHITECTURES

if TYPE_CHECKING:
    from vllm_core.api import Device

STATEMENT = (
    "experimental, not run on hardware: Intel's compiler accepts the kernels, and their non-DPAS form computes correctly on "
    "Intel's CPU runtime; never executed on an Intel GPU"
)

CODES = Partial(
    "registers spill with larger heads and on dg2, by Intel's offline compiler; for bmg and lnl none was at hand",
    cases=("pvc, heads up to 64",),
)

SPILLING = Partial(
    "registers spill with larger heads, by Intel's offline compiler: on pvc up to 132 of heads above 64, else hundreds and "
    "thousands, where core's reference serves; of dg2's up to 64 none, but where more than 16 query heads share one; for bmg "
    "and lnl no such compiler was at hand",
    cases=("heads up to 128 on pvc, up to 64 on dg2; all on bmg and lnl",),
)

CLAIMS: Mapping[str, Support] = MappingProxyType(
    {
        "dtype.float32": Full(),
        "dtype.bfloat16": Full(),
        "dtype.float16": Full(),
        "kv_dtype.fp8": CODES,
        "kv_dtype.int8": CODES,
        "attention.decoder": SPILLING,
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
        "graphs": Unsupported("torch.xpu has no graphs that this package was tried with"),
        "sleep": NotImplementedYet("pools are not brought back yet"),
        "quantization.weight_only": NotImplementedYet("registers of products with packed weights spill"),
        "quantization.fp8_activation": NotImplementedYet("registers of products with packed weights spill"),
        "parallel.tensor": Partial("written, and never run on two devices", cases=("one host",)),
        "peer_copy": NotImplementedYet("no peer copies yet"),
    }
)


@hookimpl
def manifest() -> Manifest:
    """Static facts."""
    return Manifest(
        name="xpu",
        vendor="intel",
        device_type="xpu",
        api_version="0.2",
        core_range=">=0.1.0.dev0,<0.2",
        claims=CLAIMS,
        support_level="experimental",
        visible_devices_env="ONEAPI_DEVICE_SELECTOR",
        architectures=ARCHITECTURES,
        note=STATEMENT,
        companions=versions.MATRIX,
    )


@hookimpl
def probe() -> ProbeReport:
    """Look at driver, device files, Level Zero and torch's build."""
    return probing.probe()


@hookimpl
def configure(config: Mapping[str, Any], explicit: frozenset[str]) -> ConfigPatch:
    """Step sizes."""
    return platform.configure(config, explicit)


@hookimpl
def programs(device: DeviceFacts) -> Sequence[ProgramOffer]:
    """None of its own: core's program serves."""
    return ()


@hookimpl
def start(device: DeviceFacts) -> None:
    """Choose block sizes."""
    platform.start(device)


@hookimpl
def create_device(facts: DeviceFacts) -> Device:
    """Open the GPU."""
    from vllm_xpu.device import XpuDevice

    return XpuDevice(facts)


@hookimpl
def offers(device: DeviceFacts) -> Sequence[Offer]:
    """Kernels by architecture family."""
    return backend.offers(device)
