"""Simulated accelerators that pose as vendors' modules: `environment` for a child process, `activate` for this one."""

from __future__ import annotations

from vllm_simulator.activation import activate, environment
from vllm_simulator.settings import Settings

__all__ = ["Settings", "activate", "environment"]
