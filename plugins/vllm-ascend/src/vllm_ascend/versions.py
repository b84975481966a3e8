"""Which versions of what belong together: what the manifest shows, and the probe refuses by. Plain data."""

from __future__ import annotations

from vllm_core.api import Companion

CANN = Companion(name="CANN", versions=">=8.5")
"""From the release that torch_npu's own table of versions names for torch 2.12, its newest entry."""

TORCH_NPU = Companion(name="torch_npu", versions="==2.13.*", distribution="torch_npu")
"""The one that the calls of this package were checked against. It carries the number of the torch that it is for."""

MATRIX = (CANN, TORCH_NPU)
