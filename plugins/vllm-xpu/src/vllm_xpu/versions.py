"""Which versions of what belong together: what the manifest shows, and the probe refuses by. Plain data."""

from __future__ import annotations

from vllm_core.api import Companion

TORCH = Companion(name="torch", versions=">=2.10")
"""As core asks for it."""

KERNELS_DISTRIBUTION = "vllm-xpu-kernels"
KERNELS = Companion(
    name=KERNELS_DISTRIBUTION,
    versions=">=0.1.16,<0.2",
    architectures=("pvc", "bmg", "dg2"),
    optional=True,
    distribution=KERNELS_DISTRIBUTION,
)
"""Releases of vllm-xpu-kernels whose schemas were read (`vllm_xpu.ops.xpu_kernels`)."""

MATRIX = (TORCH, KERNELS)
