"""Which versions of what belong together: what the manifest shows, and the probe refuses by. Plain data."""

from __future__ import annotations

from vllm_core.api import Companion

TORCH = Companion(name="torch", versions=">=2.10")
"""As core asks for it."""

HIP = (
    Companion(name="HIP", versions=">=6.0", architectures=("gfx90a", "gfx942", "gfx1100")),
    Companion(name="HIP", versions=">=6.4", architectures=("gfx1201",)),
    Companion(name="HIP", versions=">=7.0", architectures=("gfx950",)),
)
"""From the first ROCm release that has the architecture, as HIP's version says it, without the third number.

ROCm 6.4.1 release notes ("introduces support for the RDNA4 architecture-based ... Radeon RX 9070 XT"); change logs of ROCm
7.0.0 ("Added gfx950 support", hipFFT 1.0.20). The others are in the oldest column of ROCm's table of past releases, 6.0.
torch's builds of today (`TORCH`) are for newer ones.
"""

AITER_DISTRIBUTION = "amd-aiter"
AITER_ARCHITECTURES = ("gfx942", "gfx950")
AITER = Companion(
    name=AITER_DISTRIBUTION,
    versions=">=0.1.7,<0.2",
    architectures=AITER_ARCHITECTURES,
    optional=True,
    distribution=AITER_DISTRIBUTION,
)
"""AITER releases whose signatures were read (`vllm_rocm.ops.aiter`)."""

MATRIX = (TORCH, *HIP, AITER)


def wrong_hip(architecture: str, hip: str) -> str:
    """Why torch's HIP is too old for the chip; empty where it is not."""
    return next((one.refusal(hip) for one in HIP if architecture in one.architectures), "")
