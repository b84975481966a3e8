"""Decode steps captured once per padded number of rows, and replayed.

A step is captured when it is first asked for, so that start-up waits for none. Its input lies at a fixed address: the
packed difference is copied so that its rows of `steps` begin at one offset whatever comes before them, which takes one
copy for the update and the captured part alike. Padded rows belong to the padding slot. Directly before the rows stands the
header of the captured step, which is then a packed difference by itself.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_core.api import BatchState, Device, Graph, StepInputs, StepKey, UnsupportedError
from vllm_core.api import batch as layout

if TYPE_CHECKING:
    import numpy.typing as npt

log = logging.getLogger(__name__)

LEAD_WORDS = 1 << 16
"""Words before the rows: what a step may admit and still be replayed. Larger updates run eagerly."""

EAGER_TAIL = layout.F_LOGPROBS | layout.F_MASK
"""Features whose results have sizes of their own, or whose inputs the host brings in the middle of a step: of such a step the
forward part is captured, up to the logits, and the tail runs eagerly."""
FORWARD = -1
"""Stands for the features of a captured forward part, which needs none."""

REHEARSED = (0, layout.F_RANDOM, layout.F_RANDOM | layout.F_FILTER)
"""Features of tails that are rehearsed: greedy, drawn, and drawn from the likeliest."""

Body = Callable[[torch.Tensor, list[int], int], StepInputs]


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A captured decode step of `size` rows, for the step of `key` among others; `inputs` are left for an eager tail."""

    key: StepKey
    size: int
    graph: Graph
    inputs: StepInputs
    header: npt.NDArray[np.int32]

    @property
    def has_eager_tail(self) -> bool:
        """Whether the forward part alone is captured."""
        return bool(self.key.features & EAGER_TAIL)

    def serves(self, header: Sequence[int]) -> bool:
        """Whether every row samples, and the update leaves room for the rows."""
        lead = 2 * layout.HEADER_WORDS + header[layout.H_ADMITTED] * layout.ADMIT_WORDS + header[layout.H_TOKENS]
        lead += 4 * header[layout.H_BLOCKS] + 5 * header[layout.H_EXTRA]
        return header[layout.H_NUM_SAMPLED] == header[layout.H_SCHEDULED] and lead <= LEAD_WORDS


class CapturedSteps:
    """Graphs by padded size and features, and the buffers that their steps are staged in.

    ``body(packed, header, features)`` runs the captured part and returns the inputs that it made. A capture that fails turns
    capturing off: steps without a graph then run eagerly, and `failure` says why. `seconds` is what captures have taken so far.
    """

    def __init__(self, device: Device, state: BatchState, body: Body, sizes: Sequence[int], stages: int) -> None:
        self.failure: str | None = None
        self.seconds = 0.0
        self._device, self._state, self._body = device, state, body
        self._sizes = sorted(sizes)
        self._graphs: dict[tuple[int, int], tuple[Graph, StepInputs, npt.NDArray[np.int32]]] = {}
        self._given_up: set[tuple[int, int]] = set()
        words = LEAD_WORDS + 4 * self._sizes[-1]
        self._packed = device.allocate("state", (words,), torch.int32)
        self._stages = [(device.pinned((words,), torch.int32), device.event()) for _ in range(stages)]
        self._used = [False] * stages
        self._padding = np.tile(np.array([state.num_slots, 1, 1, 0], dtype=np.int32), self._sizes[-1])

    @property
    def count(self) -> int:
        """Graphs captured so far."""
        return len(self._graphs)

    def clear(self) -> None:
        """Forget all graphs: addresses they hold will be others'."""
        self._graphs.clear()

    def reset(self) -> None:
        """Begin anew after a rehearsal: its graphs do nothing, and what failed there may not fail where it really runs."""
        self.clear()
        self._given_up.clear()
        self.failure, self.seconds = None, 0.0

    def find(self, key: StepKey) -> CapturedStep | None:
        """The captured step that serves ``key``; None where it has to run eagerly."""
        plain = key.tokens_per_slot == 1 and key.tail == "sample" and not key.features & layout.F_PROMPT_LOGPROBS
        if not plain or key.slots > self._sizes[-1]:
            return None
        size = self._sizes[bisect_left(self._sizes, key.slots)]
        features = FORWARD if key.features & EAGER_TAIL else key.features
        found = self._graphs.get((size, features))
        if found is None and (size, features) not in self._given_up:
            found = self._capture(size, features)
        return None if found is None else CapturedStep(key, size, *found)

    def _capture(self, size: int, features: int) -> tuple[Graph, StepInputs, npt.NDArray[np.int32]] | None:
        """Run the step on padding rows, which compiles what is not compiled yet, then capture it.

        A device that records runs it by that. Either way it runs once, also where nothing is captured any more: other workers
        of the model may still capture, and run its collectives here.
        """
        started = time.perf_counter()
        packed, header = self._padded(size)
        if self._device.recorded_rows is None or self.failure is not None:
            self._body(packed, header, features)
        inputs: list[StepInputs] = []
        if self.failure is None:
            try:
                graph = self._device.capture(lambda: inputs.append(self._body(packed, header, features)))
            except (RuntimeError, UnsupportedError) as error:
                self.failure = f"{type(error).__name__}: {error}"
                log.warning("steps without a graph run eagerly: capturing one of %d rows failed: %s", size, self.failure)
        if self.failure is not None:
            self._given_up.add((size, features))
            return None
        made = self._graphs[size, features] = graph, inputs[-1], np.array(header, dtype=np.int32)
        self.seconds += time.perf_counter() - started
        return made

    def _padded(self, size: int) -> tuple[torch.Tensor, list[int]]:
        """A step of padding rows, on the device, and its header."""
        packed = self._packed[LEAD_WORDS - layout.HEADER_WORDS : LEAD_WORDS + 4 * size]
        # The longest sequence and one more: a step in flight may overshoot the end.
        longest = self._state.tokens.shape[1]
        header = [layout.LAYOUT_VERSION, 0, 0, 0, 0, size, size, size, 1, longest]
        header += [0] * (layout.HEADER_WORDS - len(header))
        packed.copy_(torch.from_numpy(np.concatenate((np.array(header, dtype=np.int32), self._padding[: 4 * size]))))
        return packed, header

    def rehearse(self) -> None:
        """Run the body of every size, with what tails commonly have."""
        for size in self._sizes:
            for features in REHEARSED if size == self._sizes[0] else REHEARSED[-1:]:
                self._body(*self._padded(size), features)

    def stage(self, step: CapturedStep, packed: npt.NDArray[np.int32], header: Sequence[int], turn: int) -> torch.Tensor:
        """Copy a step's difference and its padded rows to the device; returns the difference there."""
        rows = header[layout.H_SCHEDULED]
        host, event = self._stages[turn]
        if self._used[turn]:
            event.wait()
        own, end, lead = LEAD_WORDS - layout.HEADER_WORDS, LEAD_WORDS + 4 * step.size, len(packed) - 4 * rows
        begin = own - lead
        array = host.numpy()
        array[begin:own], array[own:LEAD_WORDS] = packed[:lead], step.header
        array[LEAD_WORDS : LEAD_WORDS + 4 * rows] = packed[lead:]
        array[LEAD_WORDS + 4 * rows : end] = self._padding[: end - LEAD_WORDS - 4 * rows]
        self._packed[begin:end].copy_(host[begin:end], non_blocking=True)
        event.record()
        self._used[turn] = True
        return self._packed[begin : LEAD_WORDS + 4 * rows]
