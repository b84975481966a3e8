"""L1: work captured once and replayed. It consists of copies, and of the op ``add`` where something serves it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vllm_conformance.case import Evidence, Subject
from vllm_conformance.cases.runs.expect import expect, passed, pattern, put, same
from vllm_conformance.cases.runs.ops import provider_of, serving
from vllm_core.api import Graph

SIZE = 4096


@dataclass(frozen=True, slots=True)
class _Sum:
    """``out = a + b`` of float32 [16, 256] on the device, and a copy of it; without an op ``add`` both are copies of ``a``."""

    subject: Subject
    a: Tensor
    b: Tensor
    out: Tensor
    copy: Tensor

    def run(self) -> None:
        """The work."""
        offers = serving(self.subject.offers, "add")
        if offers:
            provider_of(offers[0]).ops["add"](self.out, self.a, self.b)
        else:
            self.out.copy_(self.a)
        self.copy.copy_(self.out)

    def capture(self) -> Graph:
        """Run once, which compiles what must be compiled, then capture."""
        self.run()
        self.subject.device.synchronize()
        return self.subject.device.capture(self.run)

    def expected(self, a: Tensor, b: Tensor) -> Tensor:
        """What it gives for these inputs."""
        return a + b if serving(self.subject.offers, "add") else a

    def load(self, seed: int) -> Tensor:
        """New inputs at the old addresses; returns what is expected of them."""
        a, b = (pattern((16, SIZE // 16), torch.float32, n) for n in (2 * seed, 2 * seed + 1))
        self.a.copy_(a)
        self.b.copy_(b)
        return self.expected(a, b)


def _work(subject: Subject, seed: int = 0) -> _Sum:
    a, b = (pattern((16, SIZE // 16), torch.float32, n) for n in (2 * seed, 2 * seed + 1))
    out, copy = (subject.device.allocate("workspace", (16, SIZE // 16), torch.float32) for _ in range(2))
    return _Sum(subject, put(subject.device, a), put(subject.device, b), out, copy)


def a_graph_replays_what_was_captured(subject: Subject, params: Mapping[str, Any]) -> Evidence:
    """Results that were wiped out are there again after each replay."""
    work = _work(subject)
    graph = work.capture()
    expected = work.load(0)
    for turn in range(3):
        work.out.copy_(torch.full((16, SIZE // 16), -1.0))
        work.copy.copy_(torch.full((16, SIZE // 16), -1.0))
        graph.replay()
        same(work.out, expected, f"replay {turn}")
        same(work.copy, expected, f"the copy of replay {turn}")
    subject.device.release("workspace")
    return passed(expected)


def a_graph_reads_new_contents(subject: Subject, params: Mapping[str, Any]) -> Evidence:
    """Inputs are read when a graph is replayed, not when it was captured."""
    work = _work(subject)
    graph = work.capture()
    results = []
    for seed in range(1, 6):
        expected = work.load(seed)
        graph.replay()
        same(work.copy, expected, f"replay with the contents of seed {seed}")
        results.append(expected)
    subject.device.release("workspace")
    return passed(*results)


def graphs_can_be_interleaved(subject: Subject, params: Mapping[str, Any]) -> Evidence:
    """Two graphs, replayed in turn, each on its own buffers."""
    first, second = _work(subject, 1), _work(subject, 2)
    graphs = first.capture(), second.capture()
    for turn in range(3):
        expected = first.load(10 + turn), second.load(20 + turn)
        graphs[turn % 2].replay()
        graphs[1 - turn % 2].replay()
        same(first.copy, expected[0], f"turn {turn}, first graph")
        same(second.copy, expected[1], f"turn {turn}, second graph")
    subject.device.release("workspace")
    return passed()


def replays_keep_their_place_in_the_order(subject: Subject, params: Mapping[str, Any]) -> Evidence:
    """Between plain work, without waiting: copies before a replay are its inputs, copies behind it read its results."""
    device, work = subject.device, _work(subject)
    graph = work.capture()
    kept, expected = [], []
    for seed in range(8):
        expected.append(work.load(30 + seed))
        graph.replay()
        kept.append(device.allocate("workspace", (16, SIZE // 16), torch.float32))
        kept[-1].copy_(work.copy)
    event = device.event()
    event.record()
    event.wait()
    for seed, (found, wanted) in enumerate(zip(kept, expected, strict=True)):
        same(found, wanted, f"replay {seed} of 8 in a row")
    device.release("workspace")
    return passed(*expected)


def a_capture_that_raises_leaves_the_device_usable(subject: Subject, params: Mapping[str, Any]) -> Evidence:
    """What the captured work raises is raised, and the next capture works."""
    device, work = subject.device, _work(subject)
    work.run()
    device.synchronize()

    def fails() -> None:
        work.copy.copy_(work.out)
        raise KeyError("the captured work fails")

    try:
        device.capture(fails)
    except KeyError as error:
        expect("the captured work fails" in str(error), f"another error was raised: {error}")
    else:
        raise AssertionError("the error of the captured work was lost")
    expected = work.load(3)
    work.run()
    same(work.copy, expected, "plain work after a failed capture")
    graph = work.capture()
    expected = work.load(4)
    graph.replay()
    same(work.copy, expected, "a graph captured after a failed capture")
    device.release("workspace")
    return passed(expected)


def many_graphs_can_be_kept(subject: Subject, params: Mapping[str, Any]) -> Evidence:
    """One for each padded size, as the engine keeps them; all work in any order."""
    works = [_work(subject, n) for n in range(24)]
    graphs = [work.capture() for work in works]
    for n in (5, 23, 0, 11, 22, 5):
        expected = works[n].load(50 + n)
        graphs[n].replay()
        same(works[n].copy, expected, f"graph {n} of 24")
    subject.device.release("workspace")
    return passed()
