"""One step on all workers: the leader's step program, and the loop of those that follow.

Every worker gets the same StepKey and packed difference and runs the same program on its part of the model. Logits are
gathered on all of them, so each samples for itself: `sample` depends on logits, seed and length alone, hence the tokens
and the batch state are the same everywhere without another collective, and no device waits for a host. That they are is
checked now and then, by check sums of what was read anyway.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from vllm_core.api import StepDelta, StepHandle, StepKey, StepProgram, StepResult
from vllm_core.engine.parallel import channel as frames
from vllm_core.engine.parallel.channel import Channel

CHECK_STEPS = 64
"""Steps between two check sums."""


class Followers(Protocol):
    """What the leader's program asks of the other workers."""

    def broadcast(self, key: StepKey, delta: StepDelta) -> None:
        """Send a step. Raises the failure of a worker."""

    def explain(self, error: BaseException) -> BaseException:
        """The failure of a worker that caused ``error`` here, or ``error``; there are no more steps after that."""

    def compare(self, steps: int, value: int) -> None:
        """Compare a check sum with those of the workers. Raises EngineError where they differ."""


class TokenSum:
    """Check sum over all tokens; ``report`` gets (steps, value) every `CHECK_STEPS` steps."""

    def __init__(self, report: Callable[[int, int], None]) -> None:
        self._report = report
        self._steps = self._value = 0

    def add(self, result: StepResult) -> None:
        """Count a step, in the order of launch."""
        self._value = zlib.crc32(result.tokens.tobytes(), self._value)
        self._steps += 1
        if self._steps % CHECK_STEPS == 0:
            self._report(self._steps, self._value)


class LeadProgram(StepProgram):
    """Sends each step to the other workers, then runs it here."""

    def __init__(self, program: StepProgram, followers: Followers) -> None:
        self._program = program
        self._followers = followers
        self._sum = TokenSum(followers.compare)

    def load(self, weights: Any) -> None:
        """Each worker loads its own weights before it follows."""
        self._program.load(weights)

    def close(self) -> None:
        """Each worker ends its own program."""
        self._program.close()

    def prepare(self, key: StepKey) -> StepKey:
        """The key says all: capturing runs collectives, so it waits until all workers know of the step."""
        return key

    def run(self, executable: Any, delta: StepDelta) -> StepHandle:
        """Launch one step everywhere. Raises the failure of a worker, if one is behind what fails here."""
        self._followers.broadcast(executable, delta)
        return _Handle(self.guard(lambda: self._program.run(self._program.prepare(executable), delta)), self)

    def guard(self, work: Callable[[], Any]) -> Any:
        """Run ``work``; what it raises ends the group, since the workers are no longer at the same step."""
        try:
            return work()
        except BaseException as error:
            cause = self._followers.explain(error)
            if cause is error:
                raise
            raise cause from error

    def read(self, handle: StepHandle) -> StepResult:
        """Wait for a step."""
        result: StepResult = self.guard(lambda: self._read(handle))
        return result

    def _read(self, handle: StepHandle) -> StepResult:
        result = handle.result()
        self._sum.add(result)
        return result


class _Handle:
    """A step in flight on all workers; the leader's results are everybody's."""

    __slots__ = ("_handle", "_owner")

    def __init__(self, handle: StepHandle, owner: LeadProgram) -> None:
        self._handle = handle
        self._owner = owner

    def ready(self) -> bool:
        return self._handle.ready()

    def result(self) -> StepResult:
        return self._owner.read(self._handle)


def follow(program: StepProgram, channel: Channel, *, depth: int) -> None:
    """Run the leader's steps until it says stop; up to ``depth`` are in flight. Raises what the program raises."""
    total = TokenSum(lambda steps, value: channel.send(frames.DIGEST, frames.encode(frames.Digest(steps, value))))
    in_flight: deque[StepHandle] = deque()
    while True:
        kind, payload = channel.receive()
        if kind == frames.STOP:
            return
        assert kind == frames.STEP, f"frame {kind} where a step was due"
        key, delta = frames.decode_step(payload)
        in_flight.append(program.run(program.prepare(key), delta))
        if len(in_flight) == depth:
            total.add(in_flight.popleft().result())
