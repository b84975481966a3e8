"""Offers for NVIDIA GPUs. Names and metadata alone: no kernel is imported to answer."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_core.api import DeviceFacts, Offer
from vllm_cuda.backends.families import family_of
from vllm_triton import offers as shared

PROVIDER = "vllm-cuda"


def offers(device: DeviceFacts) -> Sequence[Offer]:
    """The kernels of vllm-triton, where this distribution has a tuning for the device."""
    family = family_of(device.architecture)
    if device.device_type != "cuda" or family is None:
        return ()
    return shared.offers(PROVIDER, family.architectures)
