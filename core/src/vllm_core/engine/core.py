"""The engine core: a scheduler, a step program, and up to `depth` steps in flight.

With depth 2 the next step is scheduled and launched before the last one is read, so the host never waits for a
token to decide what comes next. A constrained row needs the token before on the host for its mask: the step's forward part
is launched, then the step before is read, then the masks are brought and the rest is launched (`MaskRows`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from vllm_core.api import StepHandle, StepProgram
from vllm_core.engine.binding import BoundOps, ProviderFailedError
from vllm_core.engine.messages import EngineRequest, EngineStats, RequestUpdate
from vllm_core.engine.scheduler import ScheduledStep, Scheduler
from vllm_core.engine.structured.constraint import MaskRows
from vllm_core.engine.structured.grammars import Grammars
from vllm_core.errors import MemoryBudgetError


class EngineCore:
    """Runs requests. Not thread-safe: one thread calls all methods."""

    def __init__(
        self,
        scheduler: Scheduler,
        program: StepProgram,
        ops: BoundOps,
        *,
        depth: int = 1,
        grammars: Grammars | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.program = program
        self.ops = ops
        self._depth = depth
        self._in_flight: deque[tuple[ScheduledStep, StepHandle]] = deque()
        self._steps = 0
        self._early: list[RequestUpdate] | None = None
        self.grammars = grammars
        self.is_asleep = False

    def add(self, request: EngineRequest, grammar: Any = None) -> None:
        """Queue a request, with its compiled grammar where that is there. Raises RequestError for one that can never run."""
        wanted = None if request.params is None else request.params.structured_outputs
        if wanted is None:
            self.scheduler.add(request)
            return
        assert self.grammars is not None, "an engine that generates has grammars"
        constraint = self.grammars.constraint(wanted) if grammar is None else self.grammars.start(grammar)
        self.scheduler.add(request, constraint)

    def abort(self, request_ids: Iterable[str]) -> list[RequestUpdate]:
        """End requests now; unknown ids are ignored, since a request may have finished meanwhile."""
        return self.scheduler.abort(request_ids)

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do; asleep it has not."""
        return not self.is_asleep and (bool(self._in_flight) or self._early is not None or self.scheduler.has_work)

    def sleep(self) -> list[RequestUpdate]:
        """Read what is in flight, send running requests back to the queue, give weights and KV cache back.

        Requests may be added, and run after `wake_up`. Raises UnsupportedError where the device cannot bring memory back, and
        MemoryBudgetError where the host has no memory for the weights; the engine then goes on, and what was read comes with
        the next step.
        """
        if self.is_asleep:
            return []
        self.program.check_sleep()
        updates = self.drain()
        self.scheduler.preempt_all()
        self.scheduler.reset_prefix_cache()
        try:
            self.program.sleep()
        except MemoryBudgetError:
            self._early = updates or None
            raise
        self.is_asleep = True
        return updates

    def wake_up(self) -> None:
        """Take the memory again. Raises MemoryBudgetError where somebody else has it; the engine then sleeps on."""
        if self.is_asleep:
            self.program.wake_up()
            self.is_asleep = False

    def step(self) -> list[RequestUpdate]:
        """Launch what can be launched, then read the oldest step in flight.

        Raises ProviderFailedError when a bound op raised; the engine cannot go on after that.
        """
        return self._guarded(self._step)

    def drain(self) -> list[RequestUpdate]:
        """Read all steps in flight without launching more."""
        return self._guarded(lambda: [update for _ in range(len(self._in_flight)) for update in self._read()])

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; False while some are in use."""
        return self.scheduler.reset_prefix_cache()

    def stats(self) -> EngineStats:
        """Counters since start and gauges now."""
        stats = self.scheduler.stats()
        stats.steps = self._steps
        stats.calls_by_kind = dict(self.ops.kinds())
        return stats

    def _step(self) -> list[RequestUpdate]:
        while len(self._in_flight) < self._depth and self._early is None:
            step = self.scheduler.schedule()
            if step is None:
                break
            self._in_flight.append((step, self._launch(step)))
            self._steps += 1
        if self._early is not None:  # the steps before had to be read, and the newest has just begun
            updates, self._early = self._early, None
            return updates
        return self._read() if self._in_flight else []

    def _launch(self, step: ScheduledStep) -> StepHandle:
        if isinstance(step.delta.mask_rows, MaskRows):
            step.delta.mask_rows.wait = self._read_early
        try:
            return self.program.run(self.program.prepare(step.key), step.delta)
        except BaseException:
            self.scheduler.withdraw(step)
            raise

    def _read_early(self) -> None:
        """Read all steps in flight while a step is launched whose masks depend on their tokens."""
        if self._in_flight:
            self._early = [update for _ in range(len(self._in_flight)) for update in self._read()]

    def _read(self) -> list[RequestUpdate]:
        step, handle = self._in_flight[0]
        try:
            result = handle.result()
        except BaseException:
            while self._in_flight:
                self.scheduler.withdraw(self._in_flight.pop()[0])
            raise
        self._in_flight.popleft()
        return self.scheduler.complete(step, result)

    def _guarded(self, work: Callable[[], list[RequestUpdate]]) -> list[RequestUpdate]:
        try:
            return work()
        except Exception as error:
            culprit = self.ops.culprit(error.__traceback__)
            if culprit is None:
                raise
            raise ProviderFailedError.of(culprit, error) from error
