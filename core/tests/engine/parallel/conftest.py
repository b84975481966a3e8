"""Workers without a model: processes that speak the leader's language, and die where a test says."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_core.engine.memory import GroupMemory, KVBudget
from vllm_core.engine.parallel.group import WorkerGroup

WORKER = """
import json, os, signal, socket, sys, threading, time
from vllm_core.engine import wire
from vllm_core.engine.memory import KVBudget
from vllm_core.engine.parallel import channel as frames

channel = frames.Channel(socket.socket(fileno=os.dup(0)))
start = frames.decode_start(channel.expect(frames.START))
orders = json.loads(start.design)
frames.BEAT_S = 0.1
threading.Thread(target=channel.beat_for_ever, daemon=True).start()

def reach(point):
    order = orders.get(f"{start.rank} {point}")
    if order == "killed":
        os.kill(os.getpid(), 9)
    elif order == "exits":
        os._exit(3)
    elif order == "hangs":
        time.sleep(600)
    elif order == "computes":
        time.sleep(4)
    elif order == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif order is not None:
        channel.send(frames.FAILED, frames.encode(wire.Failure(**order)))
        os._exit(1)

reach("start")
channel.send(frames.JOINING)
reach("joining")
channel.send(frames.BUDGET, frames.encode(KVBudget((10 - start.rank, 20 + start.rank), 0, 100 + start.rank)))
channel.expect(frames.AGREED)
reach("sized")
channel.send(frames.READY)
steps = 0
while True:
    kind, payload = channel.receive()
    if kind == frames.STOP:
        reach("stop")
        break
    key, delta = frames.decode_step(payload)
    reach("step")
    steps += 1
    channel.send(frames.DIGEST, frames.encode(frames.Digest(steps, int(delta.packed.sum()))))
"""


class Joined:
    """A communicator that does nothing."""

    rank, world_size, handle = 0, 1, 1

    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


class Groups:
    """Makes groups of workers and takes them through their start."""

    def __init__(self) -> None:
        self.made: list[WorkerGroup] = []

    def __call__(self, orders: dict[str, Any] | None = None, *, count: int = 2, **options: Any) -> WorkerGroup:
        labels = [f"rank {rank} of {count}, device fake:{rank}" for rank in range(count)]
        command = [sys.executable, "-c", WORKER]
        self.made.append(WorkerGroup(labels, command, dict(os.environ), json.dumps(orders or {}).encode(), **options))
        return self.made[-1]

    def started(self, orders: dict[str, Any] | None = None, **options: Any) -> WorkerGroup:
        """A group that is ready for steps."""
        group = self(orders, **options)
        self.start(group)
        return group

    def start(self, group: WorkerGroup) -> KVBudget:
        """What `launch` does with a group, without building anything."""
        group.join(lambda rendezvous: Joined())
        spec: Any = SimpleNamespace(layers=(0,))
        layout: Any = SimpleNamespace(block_bytes=8)
        budget = group.agree(KVBudget((30, 30), 0, 1000), [GroupMemory(spec, layout)] * 2)
        group.wait_until_ready()
        return budget


@pytest.fixture
def groups() -> Iterator[Groups]:
    """Makes groups for one test; all have ended after it."""
    made = Groups()
    yield made
    for group in made.made:
        group.close()


@pytest.fixture
def ended() -> Callable[[int], bool]:
    """Whether a process is gone, or dead and not yet collected by whoever inherited it."""

    def check(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except (FileNotFoundError, ProcessLookupError):
            return True

    return check
