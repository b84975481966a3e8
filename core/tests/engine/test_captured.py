"""Steps whose capture fails, and workers of one model of which one cannot capture."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from vllm_core.api import StepKey
from vllm_core.engine.captured import CapturedSteps


class Device:
    """Captures, but for the captures that are counted in ``failing``."""

    def __init__(self, failing: frozenset[int]) -> None:
        self.failing, self.captures = failing, 0

    def allocate(self, pool, shape, dtype):
        return torch.zeros(shape, dtype=dtype)

    def pinned(self, shape, dtype):
        return torch.zeros(shape, dtype=dtype)

    def event(self):
        """None is recorded here."""

    def capture(self, work):
        self.captures += 1
        if self.captures in self.failing:
            raise RuntimeError("out of memory")
        return SimpleNamespace(work=work)


def key(slots: int) -> StepKey:
    return StepKey(slots=slots, tokens=slots, tokens_per_slot=1, tail="sample")


class Worker:
    """Counts the sums that it takes part in: one in each step that runs, none while one is captured."""

    def __init__(self, *failing: int) -> None:
        self.sums = 0
        self.device = Device(frozenset(failing))
        capture = self.device.capture

        def quiet(work):
            graph = capture(work)
            before = self.sums
            work()
            self.sums = before
            return graph

        self.device.capture = quiet
        state = SimpleNamespace(num_slots=4, tokens=torch.zeros(5, 9))
        self.steps = CapturedSteps(self.device, state, self._body, [1, 2, 4], 1)

    def _body(self, packed, header, features):
        self.sums += 1
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


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_worker_that_cannot_capture_takes_part_in_as_many_sums_as_one_that_can(failing):
    one, other = Worker(), Worker(failing)
    for slots in (1, 2, 4, 2, 1, 4):
        one.run(slots)
        other.run(slots)
        assert one.sums == other.sums, f"after a step of {slots} rows"
