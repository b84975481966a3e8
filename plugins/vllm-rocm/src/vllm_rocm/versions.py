"""Which versions of what belong together. Plain data."""

from __future__ import annotations

from vllm_triton.versions import Wrong, outside

HIP_OF = {"gfx90a": (6, 0), "gfx942": (6, 0), "gfx950": (7, 0), "gfx1100": (6, 0), "gfx1201": (6, 4)}
"""The first ROCm release that has the architecture, as HIP's version says it, without the third number.

ROCm 6.4.1 release notes ("introduces support for the RDNA4 architecture-based ... Radeon RX 9070 XT"); change logs of ROCm
7.0.0 ("Added gfx950 support", hipFFT 1.0.20). The others are in the oldest column of ROCm's table of past releases, 6.0.
torch's builds of today (`TORCH`) are for newer ones.
"""

TORCH = (2, 10)
AITER_DISTRIBUTION = "amd-aiter"
AITER_FROM, AITER_BELOW = (0, 1, 7), (0, 2)
"""AITER releases whose signatures were read (`vllm_rocm.ops.aiter`)."""

AITER_ARCHITECTURES = ("gfx942", "gfx950")


def wrong_hip(architecture: str, hip: str) -> Wrong | None:
    """Whether torch's HIP is too old for the chip."""
    needed = HIP_OF.get(architecture)
    return None if needed is None else outside("HIP", hip, needed, why=f"for {architecture}")


def wrong_torch(version: str) -> Wrong | None:
    """Whether torch is older than what core asks for."""
    return outside("torch", version, TORCH)


def wrong_aiter(version: str) -> Wrong | None:
    """Whether AITER is one whose signatures are known."""
    return outside(AITER_DISTRIBUTION, version, AITER_FROM, AITER_BELOW)
