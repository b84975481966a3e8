"""Steps whose capture fails, and workers of one model of which one cannot capture."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_core.api import StepKey
from vllm_core.api import batch as layout
from vllm_core.engine.captured import CapturedSteps


class Device:
    """Captures, but for the captures that are counted in ``failing``."""

    recorded_rows: int | None = None

    def __init__(self, failing: frozenset[int]) -> None:
        self.failing, self.captures = failing, 0

    def allocate(self, pool, shape, dtype):
        return torch.zeros(shape, dtype=dtype)

    def pinned(self, shape, dtype):
        return torch.zeros(shape, dtype=dtype)

    def event(self):
        return SimpleNamespace(record=lambda: None, wait=lambda: None)

    def capture(self, work):
        self.captures += 1
        if self.captures in self.failing:
            raise RuntimeError("out of memory")
        return SimpleNamespace(work=work)


def key(slots: int) -> StepKey:
    return StepKey(slots=slots, tokens=slots, tokens_per_slot=1, tail="sample")


class Worker:
    """Counts the sums that it takes part in: one in each step that runs, and in each capture that runs it (`recorded`)."""

    def __init__(self, *failing: int, recorded: bool = False) -> None:
        self.sums, self.bodies = 0, []
        self.device = Device(frozenset(failing))
        self.device.recorded_rows = 4 if recorded else None
        capture = self.device.capture

        def quiet(work):
            before = self.sums
            work()
            self.sums = self.sums if recorded else before
            return capture(work)

        self.device.capture = quiet
        state = SimpleNamespace(num_slots=4, tokens=torch.zeros(5, 9))
        self.steps = CapturedSteps(self.device, state, self._body, [1, 2, 4], 1)

    def _body(self, packed, header, features):
        self.sums += 1
        self.bodies.append((packed, header, features))
        return SimpleNamespace()

    def run(self, slots: int) -> bool:
        """Run a step; whether from a graph. Either way it has one sum."""
        found = self.steps.find(key(slots))
        self.sums += 1
        return found is not None


def test_what_was_captured_before_a_capture_failed_is_still_replayed():
    worker = Worker(2)
    assert [worker.run(slots) for slots in (1, 2, 4, 1, 2, 4)] == [True, False, False, True, False, False]
    assert worker.device.captures == 2, "nothing is captured after a failure"
    assert worker.steps.failure == "RuntimeError: out of memory"


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_worker_that_cannot_capture_takes_part_in_as_many_sums_as_one_that_can(failing, recorded):
    one, other = Worker(recorded=recorded), Worker(failing, recorded=recorded)
    for slots in (1, 2, 4, 2, 1, 4):
        one.run(slots)
        other.run(slots)
        assert one.sums == other.sums, f"after a step of {slots} rows"


def test_directly_before_the_rows_of_a_replayed_step_stands_its_header():
    """A library that reads counts from the packed difference finds those of the captured step, whatever came before."""
    worker = Worker()
    step = worker.steps.find(key(3))
    admits = [layout.LAYOUT_VERSION, 1, 2, 0, 0, 3, 3, 3, 1, 5] + [0] * (layout.HEADER_WORDS - 10)
    rows = [2, 1, 1, 0, 0, 1, 1, 0, 1, 1, 1, 0]
    packed = np.array([*admits, *range(layout.ADMIT_WORDS), 7, 8, *rows], dtype=np.int32)
    staged = worker.steps.stage(step, packed, admits, 0)
    lead = layout.HEADER_WORDS + layout.ADMIT_WORDS + 2
    assert staged[:lead].tolist() == packed[:lead].tolist()
    header = staged[lead : lead + layout.HEADER_WORDS].tolist()
    assert [header[i] for i in (layout.H_ADMITTED, layout.H_TOKENS, layout.H_SCHEDULED, layout.H_NUM_TOKENS)] == [0, 0, 4, 4]
    assert staged[lead + layout.HEADER_WORDS :].tolist() == rows
    captured, seen, _ = worker.bodies[-1]
    assert seen == header
    assert captured.tolist() == [*header, *rows, 4, 1, 1, 0]
