"""Which versions of what belong together. Plain data."""

from __future__ import annotations

from vllm_triton.versions import Wrong, outside

TORCH = (2, 10)
KERNELS_DISTRIBUTION = "vllm-xpu-kernels"
KERNELS_FROM, KERNELS_BELOW = (0, 1, 16), (0, 2)
"""Releases of vllm-xpu-kernels whose schemas were read (`vllm_xpu.ops.xpu_kernels`)."""


def wrong_torch(version: str) -> Wrong | None:
    """Whether torch is older than what core asks for."""
    return outside("torch", version, TORCH)


def wrong_kernels(version: str) -> Wrong | None:
    """Whether vllm-xpu-kernels is one whose schemas are known."""
    return outside(KERNELS_DISTRIBUTION, version, KERNELS_FROM, KERNELS_BELOW)
