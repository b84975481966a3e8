"""Steps recorded once and replayed: what graphs are on a host.

Work runs as it is recorded, and what it calls is noted in order. Calls of the native library that follow each other are
replayed by one call into it; ops on torch and numpy are called again with the arguments that they had (`recorded`), and torch's
own ops outside of these with the tensors that they had (`vllm_cpu.watching`). A replay reads and writes the memory that the
recorded run did, which the recording keeps alive. Work that reads a value into Python outside of an op is refused: the value
would stay.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from threading import get_ident
from typing import Any, ParamSpec, TypeAlias, TypeVar

from vllm_core.api import UnsupportedError
from vllm_cpu.native import CRecordedCall, replayer

P = ParamSpec("P")
R = TypeVar("R")

Refill: TypeAlias = Callable[[Any, Any], None]
"""Writes the values of an op's second result into the memory of its first."""

STRUCT, LINEAR, EMBEDDING = 0, 1, 2
"""How a native op takes its arguments: as one struct, or one by one as vllm_linear and vllm_embedding do."""


@dataclass(frozen=True, slots=True)
class NativeCall:
    """A call of the library: `function` with ``arguments``, which `packed` holds too, as native/replay.cpp reads them.

    ``failed`` makes the error of a status. ``kept`` owns the memory that addresses in `packed` name.
    """

    op: str
    kind: int
    function: Any
    arguments: tuple[Any, ...]
    packed: bytes
    failed: Callable[[int], Exception]
    kept: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class PythonCall:
    """Something that is called again; what it needs is its own."""

    op: str
    again: Callable[[], object]


Call: TypeAlias = "NativeCall | PythonCall"


class Recorder:
    """What has been called so far, and why it cannot be replayed, if it cannot."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.refusal: str | None = None
        self.inside = False
        """Whether an op is running whose whole call is noted: what it calls in turn is not."""

    def add(self, call: Call) -> None:
        """Note a call, unless it is part of one that is."""
        if not self.inside:
            self.calls.append(call)

    def refuse(self, reason: str) -> None:
        """The work goes on: other workers of a model wait for what it sends. The first reason stays."""
        if not self.inside and self.refusal is None:
            self.refusal = reason

    def run(self, name: str, op: Callable[[], R], refill: Refill | None) -> R:
        """Call an op with its arguments, and note how it is called again."""
        self.inside = True
        try:
            result = op()
        finally:
            self.inside = False
        if refill is not None:
            self.calls.append(PythonCall(name, partial(_refilled, refill, result, op)))
            return result
        if result is not None:
            self.refuse(f"{name} returned a value, which would be the same in every step")
        self.calls.append(PythonCall(name, op))
        return result


def _refilled(refill: Refill, first: object, op: Callable[[], object]) -> None:
    refill(first, op())


_under_way: dict[int, Recorder] = {}
"""By the thread that records; engines of other threads go on meanwhile."""


def now() -> Recorder | None:
    """The recording under way in this thread."""
    return _under_way.get(get_ident()) if _under_way else None


def recorded(op: Callable[P, R], refill: Refill | None = None) -> Callable[P, R]:
    """An op that computes by other means than the library: a recording notes its call as a whole.

    It writes its results to its arguments; one that returns tensors needs ``refill``.
    """

    @wraps(op)
    def call(*arguments: P.args, **named: P.kwargs) -> R:
        recorder = now()
        if recorder is None or recorder.inside:
            return op(*arguments, **named)
        return recorder.run(f"{op.__module__}.{op.__qualname__}", partial(op, *arguments, **named), refill)

    return call


def record(work: Callable[[], None]) -> Recording:
    """Run ``work`` and return what replays it. Raises UnsupportedError where that would not do the same."""
    from vllm_cpu.watching import Watch

    with _recording() as recorder, Watch(recorder):
        work()
    if recorder.refusal is not None:
        raise UnsupportedError(
            "Work cannot be recorded",
            on="capture on the host",
            found=recorder.refusal,
            expected="ops that write to their arguments, and nothing read by Python in between",
            fix="--enforce-eager, or another provider of the op",
        )
    return Recording(recorder.calls)


@contextmanager
def _recording() -> Iterator[Recorder]:
    thread = get_ident()
    assert thread not in _under_way, "recordings are not nested"
    recorder = _under_way[thread] = Recorder()
    try:
        yield recorder
    finally:
        del _under_way[thread]


class Recording:
    """Recorded work; `replay` does it again."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = tuple(calls)
        self._runs: list[Callable[[], object]] = []
        native: list[NativeCall] = []
        for call in self.calls:
            if isinstance(call, NativeCall):
                native.append(call)
                continue
            self._take(native)
            self._runs.append(call.again)
        self._take(native)

    def _take(self, native: list[NativeCall]) -> None:
        if native:
            replay = replayer()
            self._runs.append(_OneByOne(tuple(native)) if replay is None else _Together(tuple(native), replay))
            native.clear()

    @property
    def runs(self) -> int:
        """Calls that a replay makes from Python."""
        return len(self._runs)

    def replay(self) -> None:
        """Do the work again. Raises what its ops raise."""
        for run in self._runs:
            run()


class _Together:
    """Calls of the library that it makes itself, one after the other."""

    def __init__(self, calls: tuple[NativeCall, ...], replay: Callable[..., int]) -> None:
        self._calls, self._replay, self._status = calls, replay, ctypes.c_int32()
        self._array = (CRecordedCall * len(calls))(*map(_recorded_call, calls))
        self._arguments = ctypes.addressof(self._array), len(calls), ctypes.addressof(self._status)

    def __call__(self) -> None:
        done = self._replay(*self._arguments)
        if done < len(self._calls):
            raise self._calls[done].failed(self._status.value)


class _OneByOne:
    """Calls of a library that cannot replay, where the package's own is not there either."""

    def __init__(self, calls: tuple[NativeCall, ...]) -> None:
        self._calls = calls

    def __call__(self) -> None:
        for call in self._calls:
            if status := call.function(*call.arguments):
                raise call.failed(status)


def _recorded_call(call: NativeCall) -> CRecordedCall:
    # The bytes object is kept by the call, and its memory does not move.
    packed = ctypes.cast(ctypes.c_char_p(call.packed), ctypes.c_void_p).value
    return CRecordedCall(ctypes.cast(call.function, ctypes.c_void_p).value, packed, call.kind)
