"""When an owner takes its engine process to hang. Here time is told, not waited for."""

from __future__ import annotations

import pytest

from vllm_core.errors import EngineDeadError
from vllm_core.pulse import BEAT_S, SILENT_S, Watch


def passed(watch: Watch, seconds: float) -> str | None:
    """What is found wrong while so many seconds pass, looked at every beat."""
    for _ in range(int(seconds / BEAT_S)):
        failure = watch.passed(BEAT_S)
        if failure is not None:
            return failure.found
    return None


def test_a_process_that_beats_is_left_alone_however_long() -> None:
    watch = Watch(10.0)
    for _ in range(100):
        watch.heard(9.0)
        assert passed(watch, 5) is None


def test_a_process_that_says_nothing_hangs() -> None:
    watch = Watch(1e6)
    watch.heard(0.0)
    assert passed(watch, SILENT_S - 1) is None
    assert passed(watch, 2) == f"no sign of life for {SILENT_S:.0f} s"


def test_a_step_that_takes_too_long_hangs_though_the_process_beats() -> None:
    watch = Watch(10.0)
    watch.heard(9.9)
    assert watch.passed(BEAT_S) is None
    watch.heard(10.9)
    failure = watch.passed(BEAT_S)
    assert failure is not None
    assert failure.found == "one step that has taken 11 s"
    assert isinstance(failure.to_error(), EngineDeadError)
    assert not failure.op, "no provider is to blame"


@pytest.mark.parametrize("asleep_s", [SILENT_S, 1e6])
def test_an_owner_that_stood_still_itself_does_not_count_that_time(asleep_s: float) -> None:
    watch = Watch(10.0)
    watch.heard(0.0)
    assert watch.passed(asleep_s) is None
    assert passed(watch, SILENT_S - 3) is None
