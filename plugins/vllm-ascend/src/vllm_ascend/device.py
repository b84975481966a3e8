"""An NPU as a `Device`, over ``torch.npu``, which torch_npu adds to torch. Importing this module imports torch_npu."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch_npu

from vllm_ascend import graphs
from vllm_core.api import Communicator, DeviceFacts, Graph
from vllm_triton.device import StreamDevice

npu: Any = torch_npu.npu


class NpuDevice(StreamDevice):
    """One NPU; of an Atlas A3's chips one of the two dies."""

    supports_graphs = True

    def __init__(self, facts: DeviceFacts) -> None:
        super().__init__(facts, npu, "npu")
        self._capture_stream: Any = None
        self._graph_pool: Any = None

    def capture(self, work: Callable[[], None]) -> Graph:
        """Capture ``work`` into ACL graphs, which share one memory pool, since they replay one after the other."""
        if self._capture_stream is None:
            self._capture_stream = npu.Stream(self._device)
            self._graph_pool = npu.graph_pool_handle()
        return graphs.captured(work, self._capture_stream, self._graph_pool)

    def communicator(self, rank: int, world_size: int, rendezvous: str) -> Communicator:
        """Join a group of NPUs of one host over HCCL."""
        from vllm_triton.group import GroupCommunicator

        # This runs in a thread of its own, and the current device is a thread's.
        npu.set_device(self._device)
        return GroupCommunicator(_hccl, rank, world_size, rendezvous)


def _hccl(store: Any, rank: int, world_size: int, timeout: timedelta) -> Any:
    """torch_npu's process group, made as its own registration with torch.distributed makes it."""
    kind = torch_npu._C._distributed_c10d.ProcessGroupHCCL
    options = kind.Options()
    options.is_high_priority_stream = False
    options._timeout = timeout
    options.global_ranks_in_group = list(range(world_size))
    return kind(store, rank, world_size, options)
