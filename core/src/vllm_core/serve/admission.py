"""Who may go to the engine now: a bounded queue, and a fair share for each API key where that is asked for.

Without a fair share all requests that are let in go to the engine at once, which orders them itself; only their number is
bounded. With it the engine gets no more sequences than it can run, and the rest waits here: the key goes first whose virtual
token counter is lowest (Sheng et al. 2024, Fairness in Serving Large Language Models).
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from vllm_core.errors import DeadlineError
from vllm_core.serve.errors import HTTPRequestError

OUTPUT_WEIGHT = 2
"""A generated token counts as two tokens of a prompt, as in the paper."""


@dataclass(order=True, slots=True)
class _Waiting:
    order: tuple[int, int]
    count: int = field(compare=False)
    admitted: asyncio.Future[None] = field(compare=False)


@dataclass(slots=True)
class _Tenant:
    """One key: tokens served, requests in the engine, and those that wait, in order."""

    served: float = 0.0
    running: int = 0
    waiting: list[_Waiting] = field(default_factory=list)


class Admission:
    """Counts sequences. All methods belong to one event loop."""

    def __init__(self, capacity: int, max_queued: int | None, *, fair: bool = False) -> None:
        self._capacity, self._max_queued, self._fair = capacity, max_queued, fair
        self._tenants: dict[str, _Tenant] = {}
        self._arrivals = itertools.count()
        self._mean_s = 1.0
        self.running = 0
        """Sequences that were let through and have not ended."""
        self.waiting = 0
        """Sequences that wait here."""
        self.refused = 0
        """Requests that were turned away since start."""

    @asynccontextmanager
    async def enter(self, tenant: str, count: int, *, priority: int = 0, deadline: float | None = None) -> AsyncIterator[None]:
        """Hold a place for ``count`` sequences, waiting for it where shares are fair.

        Raises HTTPRequestError (429, with Retry-After) where too many wait, DeadlineError when the time is over.
        """
        self._check_room(count)
        loop = asyncio.get_running_loop()
        if self._fair:
            await self._wait(tenant, count, priority, deadline)
        else:
            self.running += count
        started = loop.time()
        try:
            yield
        finally:
            self.running -= count
            self._mean_s += 0.1 * (loop.time() - started - self._mean_s)
            if self._fair:
                self._tenants[tenant].running -= 1
                self._let_in()

    def charge(self, tenant: str, *, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        """Count what was served."""
        if self._fair:
            self._tenants[tenant].served += prompt_tokens + OUTPUT_WEIGHT * output_tokens

    def _check_room(self, count: int) -> None:
        beyond = self.running + self.waiting + count - self._capacity
        if self._max_queued is None or beyond <= self._max_queued:
            return
        self.refused += 1
        retry_s = min(60, max(1, round(self._mean_s * beyond / self._capacity)))
        raise HTTPRequestError(
            "Too many requests wait",
            on="request",
            found=f"{self.running + self.waiting} sequences running or waiting, and {count} more",
            expected=f"at most {self._capacity + self._max_queued}",
            fix=f"send it again after {retry_s} s, or raise --max-queued-requests",
            status=429,
            code="rate_limit_exceeded",
            headers={"retry-after": str(retry_s)},
        )

    async def _wait(self, tenant: str, count: int, priority: int, deadline: float | None) -> None:
        entry = self._tenants.setdefault(tenant, _Tenant())
        if not entry.running and not entry.waiting:
            # Idle time earns no credit: a key that comes back starts level with the one that is furthest behind.
            active = [one.served for one in self._tenants.values() if one.running or one.waiting]
            entry.served = max(entry.served, min(active, default=entry.served))
        loop = asyncio.get_running_loop()
        place = _Waiting((priority, next(self._arrivals)), count, loop.create_future())
        heapq.heappush(entry.waiting, place)
        self.waiting += count
        self._let_in()
        timer = None if deadline is None else loop.call_at(deadline, _expire, place)
        try:
            await place.admitted
        except BaseException:
            if place in entry.waiting:
                entry.waiting.remove(place)
                heapq.heapify(entry.waiting)
                self.waiting -= count
            elif place.admitted.done() and not place.admitted.cancelled() and place.admitted.exception() is None:
                # It was let in and cancelled in the same turn of the loop.
                self.running -= count
                entry.running -= 1
            self._let_in()
            raise
        finally:
            if timer is not None:
                timer.cancel()

    def _let_in(self) -> None:
        """Let requests through while there is room; one that is larger than the engine goes when nothing else runs."""
        while True:
            waiting = [one for one in self._tenants.values() if one.waiting]
            if not waiting:
                return
            first = min(waiting, key=lambda one: (one.served, one.waiting[0].order))
            place = first.waiting[0]
            if self.running and self.running + place.count > self._capacity:
                return
            heapq.heappop(first.waiting)
            self.waiting -= place.count
            if place.admitted.done():  # cancelled, or too late: whoever waited for it has been told
                continue
            self.running += place.count
            first.running += 1
            place.admitted.set_result(None)


def _expire(place: _Waiting) -> None:
    if not place.admitted.done():
        place.admitted.set_exception(deadline_error("the server's queue"))


def deadline_error(where: str) -> DeadlineError:
    """The error of a request whose time ended in ``where``."""
    return DeadlineError(
        "Request took too long",
        on="request",
        found=f"its time ended in {where}",
        expected="an answer within --request-timeout-s or x-request-timeout-s",
        fix="ask for fewer tokens, allow more time, or try when fewer requests run",
    )
