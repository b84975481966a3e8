"""A GPU as a `Device`: torch's HIP build answers under the names of ``torch.cuda``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vllm_core.api import Communicator, DeviceFacts, Graph
from vllm_triton.device import StreamDevice

_cuda: Any = torch.cuda
"""Not all of it has annotations."""

RCCL = "ProcessGroupNCCL"
"""torch's class for RCCL, which has NCCL's interface."""


class RocmDevice(StreamDevice):
    """One GPU, or one partition of it."""

    supports_graphs = True

    def __init__(self, facts: DeviceFacts) -> None:
        super().__init__(facts, _cuda, "cuda")
        self._capture_stream: Any = None
        self._graph_pool: Any = None

    def capture(self, work: Callable[[], None]) -> Graph:
        """Capture ``work`` into a HIP graph; graphs share one memory pool, since they replay one after the other."""
        if self._capture_stream is None:
            self._capture_stream = _cuda.Stream(self._device)
            self._graph_pool = _cuda.graph_pool_handle()
        stream, graph = self._capture_stream, _cuda.CUDAGraph()
        stream.wait_stream(_cuda.current_stream(self._device))
        with _cuda.stream(stream):
            graph.capture_begin(pool=self._graph_pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        _cuda.current_stream(self._device).wait_stream(stream)
        captured: Graph = graph
        return captured

    def communicator(self, rank: int, world_size: int, rendezvous: str) -> Communicator:
        """Join a group of GPUs of one host over RCCL. Raises UnsupportedError where torch has none."""
        from vllm_triton.group import GroupCommunicator

        # This runs in a thread of its own, and the current device is a thread's.
        _cuda.set_device(self._device)
        return GroupCommunicator(RCCL, rank, world_size, rendezvous)
