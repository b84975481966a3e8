"""Offers for Intel GPUs. Names and metadata alone: no kernel is imported to answer."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_core.api import DeviceFacts, Offer
from vllm_triton import tried
from vllm_xpu.backends import xpu_kernels
from vllm_xpu.backends.families import family_of

PROVIDER = "vllm-xpu"


def offers(device: DeviceFacts) -> Sequence[Offer]:
    """The kernels of vllm-triton, where this distribution has a tuning for the device; Intel's where the probe found them."""
    family = family_of(device.architecture)
    if device.device_type != "xpu" or family is None:
        return ()
    return (*tried.offers(PROVIDER, family.architectures, family.tried), *xpu_kernels.offers(device))
