"""Work captured in ACL graphs and replayed, with host values that change between replays.

The vendor's attention takes lengths as lists of the host. In a captured step they are computed on the device, before the first
layer: the capture is cut there, and a replay runs the first piece, reads the lengths, gives them to the launches of the second
(``NPUGraph.update``, of graphs captured with ``auto_dispatch_capture``), and runs it.

torch_npu, "torch.npu.NPUGraph", "torch.npu.graph" (2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import count
from types import TracebackType
from typing import Any

import torch_npu

npu: Any = torch_npu.npu

Values = Mapping[str, Sequence[int]]
"""Arguments of the vendor's attention that live on the host, by name."""

Read = Callable[[], Values]


class CapturedPieces:
    """Graphs in their order, each with what reads its host values once the ones before it have run; None where it has none."""

    def __init__(self, pieces: Sequence[tuple[Read | None, Any]]) -> None:
        self._pieces = tuple(pieces)

    def replay(self) -> None:
        """Run all of them; waits for the device before a piece with host values."""
        for read, graph in self._pieces:
            if read is not None:
                graph.update(cpu_update_input=[dict(read())])
            graph.replay()


_numbers = count(1)


class _Recording:
    """A capture under way; `number` is its own in this process."""

    def __init__(self, stream: Any, pool: Any) -> None:
        self.number = next(_numbers)
        self.pieces: list[tuple[Read | None, Any]] = []
        self._stream, self._pool = stream, pool
        self._open = ExitStack()

    def begin(self, read: Read | None) -> None:
        """Start a piece."""
        graph = npu.NPUGraph()
        self.pieces.append((read, graph))
        capture = npu.graph(graph, pool=self._pool, stream=self._stream, auto_dispatch_capture=read is not None)
        self._open.enter_context(capture)

    def cut(self, read: Read) -> None:
        """End the piece, start one whose host values ``read`` gives."""
        self._open.close()
        self.begin(read)

    def __enter__(self) -> _Recording:
        self.begin(None)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._open.__exit__(kind, error, trace)


_under_way: list[_Recording] = []


def captured(work: Callable[[], None], stream: Any, pool: Any) -> CapturedPieces:
    """Capture ``work``; what it raises is raised, and the capture ends."""
    recording = _Recording(stream, pool)
    _under_way.append(recording)
    try:
        with recording:
            work()
    finally:
        _under_way.remove(recording)
    return CapturedPieces(recording.pieces)


def recording() -> _Recording | None:
    """The capture that work of this process goes into; None where it runs at once."""
    return _under_way[-1] if _under_way else None
