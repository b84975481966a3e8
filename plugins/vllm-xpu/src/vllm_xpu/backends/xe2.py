"""Xe2 (Arc Battlemage, bmg; Lunar Lake's graphics, lnl): vector engines as wide as Xe-HPC's, fewer of them."""

from __future__ import annotations

from dataclasses import replace

from vllm_xpu.backends import xe_hpc

TUNING = replace(xe_hpc.TUNING, family="xe2")
