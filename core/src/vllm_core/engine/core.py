"""The engine core: a scheduler, a step program, and up to `depth` steps in flight.

With depth 2 the next step is scheduled and launched before the last one is read, so the host never waits for a
token to decide what comes next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from vllm_core.api import StepHandle, StepProgram
from vllm_core.engine.binding import BoundOps, ProviderFailedError
from vllm_core.engine.messages import EngineRequest, EngineStats, RequestUpdate
from vllm_core.engine.scheduler import ScheduledStep, Scheduler


class EngineCore:
    """Runs requests. Not thread-safe: one thread calls all methods."""

    def __init__(self, scheduler: Scheduler, program: StepProgram, ops: BoundOps, *, depth: int = 1) -> None:
        self.scheduler = scheduler
        self.program = program
        self._ops = ops
        self._depth = depth
        self._in_flight: deque[tuple[ScheduledStep, StepHandle]] = deque()
        self._steps = 0

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises RequestError for one that can never run."""
        self.scheduler.add(request)

    def abort(self, request_ids: Iterable[str]) -> list[RequestUpdate]:
        """End requests now; unknown ids are ignored, since a request may have finished meanwhile."""
        return self.scheduler.abort(request_ids)

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._in_flight) or self.scheduler.has_work

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
        stats.calls_by_kind = dict(self._ops.kinds())
        return stats

    def _step(self) -> list[RequestUpdate]:
        while len(self._in_flight) < self._depth:
            step = self.scheduler.schedule()
            if step is None:
                break
            self._in_flight.append((step, self._launch(step)))
            self._steps += 1
        return self._read() if self._in_flight else []

    def _launch(self, step: ScheduledStep) -> StepHandle:
        try:
            return self.program.run(self.program.prepare(step.key), step.delta)
        except BaseException:
            self.scheduler.withdraw(step)
            raise

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
            culprit = self._ops.culprit(error.__traceback__)
            if culprit is None:
                raise
            raise ProviderFailedError.of(culprit, error) from error
