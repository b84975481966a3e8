"""Workers that die, fail or hang at every stage: the leader learns which one and why, and nothing is left behind."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from vllm_core.api import StepDelta, StepKey
from vllm_core.engine.binding import ProviderFailedError
from vllm_core.engine.parallel import group as parallel_group
from vllm_core.engine.parallel.worker import Worker
from vllm_core.errors import EngineDeadError, EngineError, MemoryBudgetError

KEY = StepKey(slots=1, tokens=1, tokens_per_slot=1, tail="sample")
DELTA = StepDelta(np.arange(5, dtype=np.int32))
STAGES = ["start", "joining", "sized", "step"]


def failure(kind="MemoryBudgetError", op="", role=""):
    return {"kind": kind, "what": "W", "on": "O", "found": "F", "expected": "E", "fix": "X", "op": op, "role": role}


def serve(groups, group):
    """Start, then step for ever; returns when the group fails."""
    groups.start(group)
    while True:
        group.broadcast(KEY, DELTA)


def readable(group):
    return bool(select.select([group], [], [], 30)[0])


def test_the_smallest_budget_is_agreed_on_and_an_orderly_end_leaves_nothing(groups, ended):
    group = groups(count=3)
    folder = Path(group.rendezvous.removeprefix("file://")).parent
    assert folder.stat().st_mode & 0o077 == 0, "private to this user"
    budget = groups.start(group)
    assert (budget.num_blocks, budget.max_model_len, budget.size_bytes) == ((8, 21), 101, 8 * 29)
    group.broadcast(KEY, DELTA)
    group.close()
    assert all(ended(pid) for pid in group.pids)
    assert not folder.exists()
    assert [worker.process.returncode for worker in group._workers] == [0, 0], "told, not killed"
    group.close()


def test_groups_that_nobody_closed_end_with_the_interpreter(groups, ended):
    group = groups(count=3)
    groups.start(group)
    parallel_group._close_all()
    assert all(ended(pid) for pid in group.pids)
    assert [worker.process.returncode for worker in group._workers] == [0, 0], "told, not killed"


@pytest.mark.parametrize(("stage", "order"), [*((stage, "killed") for stage in STAGES), ("step", "exits")])
def test_a_death_is_reported_with_rank_device_and_cause(groups, ended, stage, order):
    group = groups({f"1 {stage}": order}, count=3)
    with pytest.raises(EngineDeadError) as caught:
        serve(groups, group)
    assert caught.value.on == "rank 1 of 3, device fake:1"
    assert caught.value.found == ("killed by signal 9 (Killed)" if order == "killed" else "exit status 3")
    assert all(ended(pid) for pid in group.pids), "the other worker has been ended"
    with pytest.raises(EngineDeadError):
        group.check()


@pytest.mark.parametrize("stage", ["joining", "step"])
def test_a_worker_that_hangs_is_reported_by_its_silence_and_ended(groups, ended, stage, monkeypatch):
    """It does not end its channel, and whoever computes with it waits for ever."""
    monkeypatch.setattr("vllm_core.engine.parallel.worker.SILENT_S", 3.0)
    monkeypatch.setattr("vllm_core.engine.parallel.worker.STARTING_SILENT_S", 3.0)
    group = groups({f"1 {stage}": "stopped"}, count=3)
    with pytest.raises(EngineDeadError, match="does not answer") as caught:
        serve(groups, group)
    assert caught.value.on == "rank 1 of 3, device fake:1"
    assert "the process is stopped by a signal" in caught.value.found
    assert all(ended(pid) for pid in group.pids)


def test_a_worker_that_computes_for_long_is_not_taken_for_hung(groups, monkeypatch):
    monkeypatch.setattr("vllm_core.engine.parallel.worker.SILENT_S", 3.0)
    group = groups.started({"1 step": "computes"})
    group.broadcast(KEY, DELTA)
    with group._changed:
        assert group._changed.wait_for(lambda: group._workers[0].digests or group.has_failed, timeout=60)
    assert not group.has_failed


def test_a_while_in_which_the_leader_itself_stood_still_is_no_silence():
    """A host that was asleep, or a process that was frozen with its workers."""
    worker = Worker(1, "rank 1 of 2, device fake:1", [sys.executable, "-c", ""], dict(os.environ))
    worker.is_ready = True
    assert worker.unheard(3600.0) is None
    assert all(worker.unheard(1.0) is None for _ in range(27))
    assert isinstance(worker.unheard(1.0), EngineDeadError)
    worker.heard()
    assert worker.unheard(1.0) is None
    worker.end()
    worker.channel.close()


@pytest.mark.parametrize("stage", ["joining", "step"])
def test_an_error_of_a_worker_keeps_its_kind_and_gains_its_rank(groups, stage):
    group = groups({f"1 {stage}": failure()})
    with pytest.raises(MemoryBudgetError) as caught:
        serve(groups, group)
    assert (caught.value.on, caught.value.found, caught.value.fix) == ("O, rank 1 of 2, device fake:1", "F", "X")


def test_a_provider_that_fails_elsewhere_is_named_by_its_binding(groups):
    binding = SimpleNamespace(op="sample", role="tail", provider="p", entry="m:f", kind="kernel")
    group = groups({"1 step": failure("ProviderFailedError", "sample", "tail")}, bindings=[binding])
    with pytest.raises(ProviderFailedError) as caught:
        serve(groups, group)
    assert caught.value.binding is binding


@pytest.mark.parametrize("order", ["killed", failure()])
def test_an_error_in_a_collective_is_the_echo_of_another_workers_end(groups, order):
    """Whose connection broke reports first, and knows nothing of the cause."""
    echo = failure("ProviderFailedError", "all_reduce", "comm")
    group = groups({"1 step": order, "2 step": echo}, count=3)
    with pytest.raises(EngineError if order == "killed" else MemoryBudgetError) as caught:
        serve(groups, group)
    assert "rank 1 of 3" in caught.value.on


def dies_slowly(pid):
    """Kill a worker a while after it has stopped: one whose connections break before it is seen to be gone."""

    def run():
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.05)
        time.sleep(1.5)
        os.kill(pid, signal.SIGKILL)

    threading.Thread(target=run, daemon=True).start()


def test_an_error_of_the_leader_waits_for_a_death_that_is_slow_to_be_seen(groups):
    """On a busy host it was blamed on the provider of the collective."""
    group = groups.started({"1 step": "stopped"})
    dies_slowly(group.pids[0])
    group.broadcast(KEY, DELTA)
    cause = group.explain(RuntimeError("connection reset by peer"))
    assert isinstance(cause, EngineDeadError)
    assert "killed by signal 9" in cause.found


def test_an_echo_waits_for_a_death_that_is_slow_to_be_seen(groups):
    group = groups({"1 step": "stopped", "2 step": failure("ProviderFailedError", "all_reduce", "comm")}, count=3)
    dies_slowly(group.pids[0])
    with pytest.raises(EngineDeadError, match="killed by signal 9") as caught:
        serve(groups, group)
    assert caught.value.on == "rank 1 of 3, device fake:1"


def test_an_echo_of_which_nobody_has_died_is_told(groups):
    group = groups({"2 step": failure("ProviderFailedError", "all_reduce", "comm")}, count=3)
    with pytest.raises(EngineError, match="rank 2 of 3"):
        serve(groups, group)


def test_an_error_of_the_leader_is_explained_by_the_workers_death(groups):
    group = groups.started({"1 step": "killed"})
    group.broadcast(KEY, DELTA)
    cause = group.explain(RuntimeError("connection closed by peer"))
    assert isinstance(cause, EngineDeadError)
    assert "rank 1 of 2" in cause.on


@pytest.mark.parametrize("error", [RuntimeError("mine"), KeyboardInterrupt()])
def test_an_error_of_the_leader_alone_stays_and_ends_the_workers(groups, ended, error):
    group = groups.started()
    assert group.explain(error) is error
    assert all(ended(pid) for pid in group.pids)
    assert group.has_failed
    with pytest.raises(EngineError, match=type(error).__name__):
        group.broadcast(KEY, DELTA)
    assert group.explain(error) is error, "asked again further out"


def test_a_rendezvous_that_never_returns_is_left_when_a_worker_dies(groups):
    group, never = groups({"1 joining": "killed"}), threading.Event()
    with pytest.raises(EngineDeadError, match="rank 1 of 2"):
        group.join(lambda rendezvous: never.wait())
    never.set()


def test_a_rendezvous_that_fails_raises_its_own_error(groups):
    def fails(rendezvous):
        raise MemoryBudgetError("W", on="here", found="F", expected="E", fix="X")

    with pytest.raises(MemoryBudgetError, match="here"):
        groups().join(fails)


def test_a_failure_wakes_a_leader_that_waits_for_something_else(groups):
    group = groups.started()
    assert not select.select([group], [], [], 0)[0]
    os.kill(group.pids[0], 9)
    assert readable(group)
    with pytest.raises(EngineDeadError, match="rank 1 of 2"):
        group.check()


def test_a_failure_closes_the_communicator(groups):
    """Whatever waits for the dead in a collective returns."""
    group = groups.started()
    os.kill(group.pids[0], 9)
    assert readable(group)
    group._watcher.join()
    assert group._communicator.closed


def test_a_leader_that_does_not_notice_is_told_on_another_thread(groups, monkeypatch):
    monkeypatch.setattr("vllm_core.engine.parallel.group.STUCK_S", 0.05)
    told, done = [], threading.Event()
    group = groups.started(on_stuck=lambda error: (told.append(error), done.set()))
    os.kill(group.pids[0], 9)
    assert done.wait(30)
    assert "rank 1 of 2" in told[0].on


def test_a_leader_that_notices_is_left_alone(groups):
    told = []
    group = groups.started(on_stuck=told.append)
    os.kill(group.pids[0], 9)
    assert readable(group)
    with pytest.raises(EngineDeadError):
        group.check()
    group._watcher.join()
    assert told == []


class Stuck:
    """A process that waits for a driver: no signal reaches it."""

    pid, kills = 1 << 30, 0

    def kill(self):
        self.kills += 1

    def wait(self, timeout=None):
        assert timeout is not None, "whoever waits for it waits for ever"
        raise subprocess.TimeoutExpired("worker", timeout)


def test_a_worker_that_cannot_be_killed_does_not_keep_the_failure_back(groups):
    """A device that hangs in its driver: the process is in uninterruptible sleep."""
    group = groups.started(count=3)
    worker = group._workers[0]
    real, worker.process = worker.process, Stuck()
    os.kill(group.pids[1], 9)
    assert readable(group)
    with pytest.raises(EngineDeadError, match="rank 2 of 3"):
        group.check()
    group.close()
    assert worker.process.kills
    assert real.wait(30) == 0, "its channel has ended"


@pytest.mark.parametrize("stage", ["start", "sized", "stop"])
def test_a_worker_that_hangs_is_killed_at_the_end(groups, ended, stage, monkeypatch):
    group = groups({f"1 {stage}": "hangs"}) if stage != "stop" else groups.started({"1 stop": "hangs"})
    group.close(patience_s=0.2)
    assert all(ended(pid) for pid in group.pids)


def test_workers_with_other_tokens_are_found_out(groups):
    group = groups.started()
    for _ in range(2):
        group.broadcast(KEY, DELTA)
    with group._changed:
        assert group._changed.wait_for(lambda: len(group._workers[0].digests) == 2, timeout=30)
    group.compare(1, int(DELTA.packed.sum()))
    with pytest.raises(EngineError, match="rank 1 of 2, device fake:1, step 2"):
        group.compare(2, 11)


def test_check_sums_that_nobody_answers_do_not_pile_up(groups):
    group = groups.started()
    for step in range(100):
        group.compare(step, 0)
    assert len(group._sums) <= 16


@pytest.mark.parametrize("seed", range(8))
def test_a_death_at_any_time_is_reported(groups, ended, seed):
    """From the first instruction of the process to its steps; what is killed too early is no less reported."""
    chance = random.Random(seed)
    group = groups(count=3)
    rank = chance.randrange(2)
    timer = threading.Timer(chance.random() * 0.6, os.kill, (group.pids[rank], 9))
    timer.start()
    with pytest.raises(EngineDeadError, match=f"rank {rank + 1} of 3, device fake:{rank + 1}") as caught:
        serve(groups, group)
    timer.join()
    assert caught.value.found == "killed by signal 9 (Killed)"
    assert all(ended(pid) for pid in group.pids)
