"""Requests that wait, in order: O(log n) to add and take, constant to look at and to drop one."""

from __future__ import annotations

import heapq

from vllm_core.engine.request import Request


class WaitingQueue:
    """A heap by (priority, arrival); a preempted request keeps its place.

    Dropped requests leave when they come up, or all at once when they are the greater part: constant per drop on average.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Request]] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, request: Request) -> None:
        """Add a request at its place."""
        heapq.heappush(self._heap, (request.order, request))
        self._size += 1

    def peek(self) -> Request | None:
        """The first request, or None."""
        while self._heap and self._heap[0][1].finished:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Request:
        """Take the request that `peek` showed."""
        self._size -= 1
        return heapq.heappop(self._heap)[1]

    def drop(self, request: Request) -> None:
        """Count out a waiting request, which the caller has marked finished."""
        self._size -= 1
        if len(self._heap) > 2 * self._size + 64:
            self._heap = [entry for entry in self._heap if not entry[1].finished]
            heapq.heapify(self._heap)
