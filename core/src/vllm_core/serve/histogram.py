"""Histograms that are cheap to feed: one is observed for every token.

prometheus_client's own takes a lock for the sum and one for the bucket, which it looks for from the first. Here
one thread observes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Histogram:
    """Observations by bucket; ``bounds`` are the upper ones, in order, each part of its bucket."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = [*map(float, bounds)]
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    @property
    def sum(self) -> float:
        """Of all that was observed."""
        return self._sum

    def cumulative(self) -> list[tuple[str, float]]:
        """For each bound, as Prometheus writes it, how many were at most that."""
        found, total = [], 0
        for bound, count in zip([*self._bounds, float("inf")], self._counts, strict=True):
            total += count
            found.append((floatToGoString(bound), float(total)))  # type: ignore[no-untyped-call]
        return found


class Histograms(Collector):
    """All histograms of one server, each with the same labels."""

    def __init__(self, labels: dict[str, str]) -> None:
        self._labels = labels
        self._made: list[tuple[str, str, Histogram]] = []

    def make(self, name: str, text: str, bounds: Sequence[float]) -> Histogram:
        """A histogram that is shown under ``name``."""
        made = Histogram(bounds)
        self._made.append((name, text, made))
        return made

    def collect(self) -> Iterator[Metric]:
        """Yield the families."""
        for name, text, one in self._made:
            family = HistogramMetricFamily(name, text, labels=tuple(self._labels))
            family.add_metric(tuple(self._labels.values()), one.cumulative(), one.sum)
            yield family
