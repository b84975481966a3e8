"""A time limit counts processor time while other work has the processors, and never lets a child that waits go on."""

from __future__ import annotations

import pytest

from vllm_conformance import worker

LIMIT_S = 0.02


@pytest.fixture
def clock():
    """One whose limit has passed."""
    made = worker._Clock(LIMIT_S, 100.0)
    while worker.time.monotonic() < made.deadline:
        pass
    return made


def test_a_child_that_waits_has_used_its_time(clock):
    assert not clock.goes_on(100.0)


def test_a_child_that_got_little_of_a_processor_goes_on(clock):
    before = clock.deadline
    assert clock.goes_on(100.0 + LIMIT_S / 4)
    assert clock.deadline > before


def test_a_child_that_had_its_time_of_a_processor_ends(clock):
    assert not clock.goes_on(100.0 + 2 * LIMIT_S)


def test_a_child_that_went_on_and_then_waits_ends(clock):
    assert clock.goes_on(100.0 + LIMIT_S / 4)
    assert not clock.goes_on(100.0 + LIMIT_S / 4)


def test_patience_has_an_end():
    clock = worker._Clock(LIMIT_S, 0.0)
    while worker.time.monotonic() < clock.deadline + worker.PATIENCE * LIMIT_S:
        pass
    assert not clock.goes_on(LIMIT_S / 4)
