"""The leader sends before it runs; those that follow run the same steps, in order, as deep as the leader goes."""

from __future__ import annotations

import socket
import threading

import numpy as np
import pytest

from vllm_core.api import StepDelta, StepKey, StepProgram, StepResult
from vllm_core.engine.parallel import channel as frames
from vllm_core.engine.parallel.channel import Channel
from vllm_core.engine.parallel.program import CHECK_STEPS, LeadProgram, TokenSum, follow

KEY = StepKey(slots=1, tokens=1, tokens_per_slot=1, tail="sample")


def delta(number):
    return StepDelta(np.array([number], dtype=np.int32))


class Handle:
    def __init__(self, events, number):
        self.events, self.number = events, number

    def ready(self):
        return True

    def result(self):
        self.events.append(("read", self.number))
        tokens = np.array([[self.number]], dtype=np.int32)
        return StepResult(tokens, np.ones(1, dtype=np.int32), np.zeros(1, dtype=bool))


class Program(StepProgram):
    """Notes what is asked of it; raises at one step."""

    def __init__(self, fails_at=None):
        self.events, self.fails_at = [], fails_at

    def load(self, weights):
        self.events.append(("load", weights))

    def prepare(self, key):
        self.events.append(("prepare", key.slots))
        return key

    def run(self, executable, delta):
        number = int(delta.packed[0])
        if number == self.fails_at:
            raise RuntimeError("connection closed by peer")
        self.events.append(("run", number))
        return Handle(self.events, number)


class Others:
    """The followers of a leader under test."""

    def __init__(self, events, cause=None):
        self.events, self.cause, self.sums = events, cause, []

    def broadcast(self, key, delta):
        self.events.append(("send", int(delta.packed[0])))

    def explain(self, error):
        self.events.append(("explain", str(error)))
        return self.cause or error

    def compare(self, steps, value):
        self.sums.append((steps, value))


def test_the_leader_sends_first_and_prepares_after():
    """Preparing may capture a graph, which runs collectives that need everybody."""
    program = Program()
    lead = LeadProgram(program, Others(program.events))
    handle = lead.run(lead.prepare(KEY), delta(7))
    assert handle.ready()
    assert handle.result().tokens.tolist() == [[7]]
    assert program.events == [("send", 7), ("prepare", 1), ("run", 7), ("read", 7)]


def test_an_error_of_the_leader_gets_the_cause_that_the_group_knows():
    program = Program(fails_at=1)
    cause = ValueError("rank 1 is gone")
    lead = LeadProgram(program, Others(program.events, cause))
    with pytest.raises(ValueError, match="rank 1") as caught:
        lead.run(KEY, delta(1))
    assert str(caught.value.__cause__) == "connection closed by peer"
    lead = LeadProgram(program, Others(program.events))
    with pytest.raises(RuntimeError, match="closed by peer"):
        lead.run(KEY, delta(1))


@pytest.mark.parametrize("depth", [1, 2])
def test_followers_run_every_step_in_order_and_read_what_is_deep_enough(depth):
    one, other = map(Channel, socket.socketpair())
    program = Program()
    for number in range(3):
        one.send(frames.STEP, frames.encode_step(KEY, delta(number)))
    one.send(frames.STOP)
    follow(program, other, depth=depth)
    steps = [event for event in program.events if event[0] != "prepare"]
    if depth == 1:
        assert steps == [(what, number) for number in range(3) for what in ("run", "read")]
    else:
        assert steps == [("run", 0), ("run", 1), ("read", 0), ("run", 2), ("read", 1)]
    one.close()
    other.close()


def test_leader_and_followers_have_the_same_check_sums():
    one, other = map(Channel, socket.socketpair())
    thread = threading.Thread(target=follow, args=(Program(), other), kwargs={"depth": 2})
    thread.start()
    others = Others([])
    lead = LeadProgram(Program(), others)
    for number in range(2 * CHECK_STEPS + 1):
        one.send(frames.STEP, frames.encode_step(KEY, delta(number)))
        lead.run(KEY, delta(number)).result()
    one.send(frames.STOP)
    thread.join()
    digests = [frames.decode_digest(one.expect(frames.DIGEST)) for _ in range(2)]
    assert [(d.steps, d.value) for d in digests] == others.sums
    one.close()
    other.close()


def test_one_other_token_changes_the_sum_for_good():
    sums = ([], [])
    for index, tokens in enumerate(([1, 2, 3], [1, 9, 3])):
        total = TokenSum(lambda steps, value, index=index: sums[index].append(value))
        for step in range(2 * CHECK_STEPS):
            total.add(Handle([], tokens[min(step, 2)]).result())
    assert sums[0][0] != sums[1][0]
    assert sums[0][1] != sums[1][1]


def test_weights_are_each_workers_own():
    program = Program()
    LeadProgram(program, Others(program.events)).load("mine")
    assert program.events == [("load", "mine")]
