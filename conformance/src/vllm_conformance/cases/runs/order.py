"""L1: the order of work, with copies alone, so that devices without eager ops have it too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from vllm_conformance.case import Evidence, Subject
from vllm_conformance.cases.runs.expect import expect, passed, pattern, put, same

SIZE = 1 << 16
CHAIN = 61


def work_runs_in_the_order_of_its_calls(subject: Subject, params: Mapping[str, Any]) -> Evidence:
    """A value travels through a chain of buffers, none of which may be overtaken."""
    device = subject.device
    values = pattern((SIZE,), torch.float32, 1)
    buffers = [device.allocate("workspace", (SIZE,), torch.float32) for _ in range(8)]
    buffers[0].copy_(values)
    for step in range(CHAIN):
        buffers[(step + 1) % 8].copy_(buffers[step % 8])
        buffers[step % 8].copy_(buffers[(step + 3) % 8])
    same(buffers[CHAIN % 8], values, f"after {CHAIN} copies from buffer to buffer")
    device.release("workspace")
    return passed(values)


def events_are_reached_in_order(subject: Subject, params: Mapping[str, Any]) -> Evidence:
    """Once an event is reached, so are all that were recorded before it, and what they stand for is there."""
    device = subject.device
    source = [put(device, pattern((SIZE,), torch.float32, n)) for n in range(10)]
    targets = [device.pinned((SIZE,), torch.float32) for _ in range(10)]
    events = []
    for one, target in zip(source, targets, strict=True):
        target.copy_(one, non_blocking=True)
        event = device.event()
        event.record()
        if not device.asynchronous:
            expect(event.query(), "a device that is not asynchronous has an event that is not reached")
        events.append(event)
    for last in (3, 9):
        events[last].wait()
        expect(all(event.query() for event in events[: last + 1]), f"event {last} is reached, an earlier one is not")
        for n in range(last + 1):
            same(targets[n], pattern((SIZE,), torch.float32, n), f"copy {n} behind event {last}")
    device.release("workspace")
    return passed(*targets)


def synchronize_waits_for_everything(subject: Subject, params: Mapping[str, Any]) -> Evidence:
    """After it all events are reached and pinned memory holds the results."""
    device = subject.device
    values = pattern((SIZE,), torch.int32, 5)
    there = put(device, values)
    targets = [device.pinned((SIZE,), torch.int32) for _ in range(16)]
    for target in targets:
        target.copy_(there, non_blocking=True)
    event = device.event()
    event.record()
    device.synchronize()
    expect(event.query(), "an event is not reached after synchronize")
    for n, target in enumerate(targets):
        same(target, values, f"copy {n}")
    device.synchronize()
    device.release("workspace")
    return passed(values)


def an_event_can_be_recorded_again(subject: Subject, params: Mapping[str, Any]) -> Evidence:
    """The engine keeps one event for each staging buffer and records it at every turn."""
    device, event = subject.device, subject.device.event()
    source, target = device.allocate("workspace", (SIZE,), torch.int32), device.pinned((SIZE,), torch.int32)
    for turn in range(5):
        values = pattern((SIZE,), torch.int32, turn)
        source.copy_(values)
        target.copy_(source, non_blocking=True)
        event.record()
        event.wait()
        expect(event.query(), f"turn {turn}: waited for, and not reached")
        same(target, values, f"turn {turn}")
    device.release("workspace")
    return passed(target)


def buffers_in_rotation_are_not_mixed_up(subject: Subject, params: Mapping[str, Any]) -> Evidence:
    """Staging as the engine does it: a pinned buffer is filled again only after the event of its last copy."""
    device, turns, stages = subject.device, 40, 4
    pinned = [device.pinned((SIZE // 16,), torch.int32) for _ in range(stages)]
    staged = [device.allocate("workspace", (SIZE // 16,), torch.int32) for _ in range(stages)]
    kept = [device.allocate("workspace", (SIZE // 16,), torch.int32) for _ in range(turns)]
    events = [device.event() for _ in range(stages)]
    for turn in range(turns):
        stage = turn % stages
        if turn >= stages:
            events[stage].wait()
        pinned[stage].fill_(turn)
        staged[stage].copy_(pinned[stage], non_blocking=True)
        events[stage].record()
        kept[turn].copy_(staged[stage])
    device.synchronize()
    for turn in range(turns):
        same(kept[turn], torch.full((SIZE // 16,), turn, dtype=torch.int32), f"turn {turn}")
    device.release("workspace")
    return passed()
