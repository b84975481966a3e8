from __future__ import annotations

import logging
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from vllm_core.api import StepKey
from vllm_core.engine.captured import CapturedSteps
from vllm_core.engine.rehearsal import rehearse

SPEC = SimpleNamespace(vocab_size=50, pooling=None)


class Device:
    """Rehearses with providers of its own."""

    def __init__(self) -> None:
        self.inside, self.asked = False, None

    def rehearsal(self, providers):
        self.asked = providers
        return self._inside() if providers <= {"own"} else None

    @contextmanager
    def _inside(self):
        self.inside = True
        try:
            yield
        finally:
            self.inside = False


class Core:
    """Ends every request after two steps; notes whether the device was rehearsing."""

    def __init__(self, device: Device, failure: Exception | None = None) -> None:
        self.device, self.failure = device, failure
        self.left: list[int] = []
        self.lengths: list[int] = []
        self.inside: set[bool] = set()
        self.scheduler = self

    def add(self, request, constraint=None) -> None:
        self.left.append(2)
        self.lengths.append(len(request.prompt_token_ids))

    @property
    def has_work(self) -> bool:
        return bool(self.left)

    def step(self):
        if self.failure is not None:
            raise self.failure
        self.inside.add(self.device.inside)
        self.left = [count - 1 for count in self.left if count > 1]
        return []


class Program:
    """Has captured steps."""

    def __init__(self, device: Device) -> None:
        self.device, self.events = device, []
        self.captured = SimpleNamespace(reset=lambda: self.events.append("cleared"))

    def rehearse(self) -> None:
        self.events.append(("rehearsed", self.device.inside))


class Capturing:
    """Captures, but not while it rehearses."""

    rehearsing = True
    recorded_rows = None

    def allocate(self, pool, shape, dtype):
        return torch.zeros(shape, dtype=dtype)

    def pinned(self, shape, dtype):
        return torch.zeros(shape, dtype=dtype)

    def event(self):
        """Nobody waits."""

    def capture(self, work):
        if self.rehearsing:
            raise RuntimeError("no stream is capturing")
        work()


@pytest.fixture
def made():
    device = Device()
    return device, Core(device), Program(device)


def test_every_step_runs_where_the_device_runs_nothing_and_no_graph_of_it_stays(made):
    device, core, program = made
    assert rehearse(core, program, device, ["own"], SPEC, 300)
    assert core.inside == {True}
    assert program.events == [("rehearsed", True), "cleared"]


def test_prompts_have_all_powers_of_two_that_the_context_holds(made):
    device, core, program = made
    rehearse(core, program, device, ["own"], SPEC, 300)
    assert {1, 2, 4, 8, 16, 32, 64, 128, 256} <= set(core.lengths)
    assert max(core.lengths) <= 296


def test_where_another_provider_would_really_run_nothing_does(made):
    device, core, program = made
    assert not rehearse(core, program, device, ["own", "another"], SPEC, 300)
    assert device.asked == {"own", "another"}
    assert (core.lengths, program.events) == ([], [])


def test_a_rehearsal_that_fails_is_logged_and_leaves_no_graph(made, caplog):
    device, _, program = made
    core = Core(device, failure=ValueError("no such tile"))
    with caplog.at_level(logging.INFO, logger="vllm_core"):
        rehearse(core, program, device, ["own"], SPEC, 300)
    assert "ValueError: no such tile" in caplog.text
    assert (program.events, device.inside) == (["cleared"], False)


def test_a_capture_that_failed_in_a_rehearsal_is_tried_again():
    """Else all steps would run eagerly, because of a device that could not pretend."""
    state = SimpleNamespace(num_slots=2, tokens=torch.zeros(3, 9))
    device = Capturing()
    captured = CapturedSteps(device, state, lambda packed, header, features: "inputs", [1, 2], 1)
    key = StepKey(slots=1, tokens=1, tokens_per_slot=1, tail="sample")
    assert captured.find(key) is None
    captured.reset()
    assert (captured.failure, captured.seconds, captured.count) == (None, 0.0, 0)
    device.rehearsing = False
    assert captured.find(key) is not None
