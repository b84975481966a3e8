"""A GPU as a `Device`, over ``torch.xpu``. Steps are not captured: torch has no graphs for it that this was tried with."""

from __future__ import annotations

import torch

from vllm_core.api import Communicator, DeviceFacts
from vllm_triton.device import StreamDevice

XCCL = "ProcessGroupXCCL"
"""torch's class for Intel's collectives."""


class XpuDevice(StreamDevice):
    """One GPU, or one stack of it, as ZE_FLAT_DEVICE_HIERARCHY has it."""

    def __init__(self, facts: DeviceFacts) -> None:
        super().__init__(facts, torch.xpu, "xpu")

    def communicator(self, rank: int, world_size: int, rendezvous: str) -> Communicator:
        """Join a group of GPUs of one host over XCCL. Raises UnsupportedError where torch has none."""
        from vllm_triton.group import GroupCommunicator

        # This runs in a thread of its own, and the current device is a thread's.
        torch.xpu.set_device(self._device)
        return GroupCommunicator(XCCL, rank, world_size, rendezvous)
