"""The waiting queue: order, dropping, and what it keeps."""

from __future__ import annotations

import random

import pytest

from vllm_core.engine.queue import WaitingQueue
from vllm_core.engine.request import Request


@pytest.fixture
def entry(fake):
    def make(arrival, priority=0):
        return Request(fake.request(f"r{arrival}"), (priority, arrival), 1, 64, 0.0)

    return make


def drain(queue):
    out = []
    while queue.peek() is not None:
        out.append(queue.pop())
    return out


def test_requests_come_out_by_priority_then_arrival(entry):
    entries = [entry(arrival, arrival % 3) for arrival in range(20)]
    queue = WaitingQueue()
    for one in random.Random(0).sample(entries, len(entries)):
        queue.push(one)
    assert drain(queue) == sorted(entries, key=lambda one: (one.order[0], one.order[1]))
    assert len(queue) == 0


def test_peek_takes_nothing(entry):
    queue = WaitingQueue()
    queue.push(one := entry(1))
    assert queue.peek() is queue.peek() is one
    assert len(queue) == 1
    assert queue.pop() is one
    assert queue.peek() is None


def test_one_that_comes_back_takes_its_old_place(entry):
    queue = WaitingQueue()
    first, second, third = (entry(arrival) for arrival in (1, 2, 3))
    for one in (first, second, third):
        queue.push(one)
    queue.peek()
    back = queue.pop()
    queue.push(entry(4))
    queue.push(back)
    assert [one.order[1] for one in drain(queue)] == [1, 2, 3, 4]


def test_a_dropped_request_is_not_counted_and_never_comes_out(entry):
    queue = WaitingQueue()
    entries = [entry(arrival) for arrival in range(5)]
    for one in entries:
        queue.push(one)
    for one in (entries[0], entries[3]):
        one.finished = True
        queue.drop(one)
    assert len(queue) == 3
    assert drain(queue) == [entries[1], entries[2], entries[4]]


def test_dropped_requests_are_not_kept_behind_one_that_waits(entry):
    """A head that cannot come in must not make the aborted ones behind it pile up."""
    queue = WaitingQueue()
    queue.push(head := entry(0))
    for arrival in range(1, 1000):
        queue.push(one := entry(arrival))
        one.finished = True
        queue.drop(one)
    assert len(queue) == 1
    assert queue.peek() is head
    assert len(queue._heap) < 100


def test_the_order_holds_after_the_dropped_ones_have_been_thrown_out(entry):
    queue = WaitingQueue()
    entries = [entry(arrival, -arrival) for arrival in range(300)]
    for one in entries:
        queue.push(one)
    for one in entries[::2] + entries[1:200:2]:
        one.finished = True
        queue.drop(one)
    entries_left = [one for one in reversed(entries) if not one.finished]
    assert len(queue) == len(entries_left) == 50
    assert drain(queue) == entries_left
