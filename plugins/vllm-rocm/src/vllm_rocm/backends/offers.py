"""Offers for AMD GPUs. Names and metadata alone: no kernel is imported to answer."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_core.api import DeviceFacts, Offer
from vllm_rocm.backends import aiter
from vllm_rocm.backends.families import family_of
from vllm_triton import tried

PROVIDER = "vllm-rocm"


def offers(device: DeviceFacts) -> Sequence[Offer]:
    """The kernels of vllm-triton, where this distribution has a tuning for the device; AITER's where the probe found it."""
    family = family_of(device.architecture)
    if device.device_type != "hip" or family is None:
        return ()
    return (*tried.offers(PROVIDER, family.architectures, family.tried), *aiter.offers(device))
