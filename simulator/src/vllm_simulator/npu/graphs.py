"""`torch.npu.NPUGraph` and `torch.npu.graph`: capture, replay, and new host values for launches that take some.

As torch_npu's `auto_dispatch_capture` does it: of each captured launch of the attention the lists of lengths may be replaced
before a replay, with `NPUGraph.update`; without it they stay what they were when it was captured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from vllm_simulator.poses.device_api import graph_type

_capturing: list[Any] = []


def updatable(values: dict[str, Any]) -> dict[str, Any]:
    """Host values of a launch, which the graph that it is captured in may replace; read them when the launch runs."""
    if _capturing and _capturing[-1].auto_dispatch_capture:
        _capturing[-1].records.append(values)
    return values


def functions(native: ModuleType) -> dict[str, Any]:
    """What `torch.npu` has of graphs."""
    plain: Any = graph_type(native)

    class NPUGraph(plain):  # type: ignore[misc]
        """Work captured once."""

        def __init__(self) -> None:
            super().__init__()
            self.auto_dispatch_capture = False
            self.records: list[dict[str, Any]] = []

        def update(self, cpu_update_input: Sequence[Mapping[str, Any]]) -> None:
            """Replace host values: one set for all launches, or one for each. Raises RuntimeError."""
            if not self.auto_dispatch_capture:
                raise RuntimeError("The current graph configuration does not support update")
            sets = [*cpu_update_input] * (len(self.records) if len(cpu_update_input) == 1 else 1)
            if len(sets) != len(self.records):
                raise RuntimeError(f"{len(self.records)} launches need to be updated, and there are {len(sets)} elements")
            for record, new in zip(self.records, sets, strict=True):
                record.update({name: value for name, value in new.items() if name in record})

    @contextmanager
    def graph(
        npu_graph: NPUGraph,
        pool: Any = None,
        stream: Any = None,
        auto_dispatch_capture: bool = False,
        capture_error_mode: str = "global",
    ) -> Iterator[None]:
        native.synchronize(native.current_device())
        npu_graph.auto_dispatch_capture = auto_dispatch_capture
        npu_graph.capture_begin(pool=pool, capture_error_mode=capture_error_mode)
        _capturing.append(npu_graph)
        try:
            yield
        finally:
            _capturing.remove(npu_graph)
            npu_graph.capture_end()

    return {
        "NPUGraph": NPUGraph,
        "graph": graph,
        "graph_pool_handle": lambda: (0, 1),
        "is_current_stream_capturing": native.is_capturing,
    }
