"""Ctrl-C waits for the end of a step: one cut in its midst would leave requests half scheduled, and the engine unusable."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class Deferred:
    """Context manager that notes the first Ctrl-C and raises KeyboardInterrupt in `check` or at its end.

    A second Ctrl-C is raised where it comes, for a step that does not end. Other threads, and programs with a handler of
    their own, are left alone.
    """

    def __init__(self) -> None:
        self._noted = False
        self._active = False

    def check(self) -> None:
        """Raise what was noted. Called between steps."""
        if self._noted:
            self._noted = False
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._noted:
            raise KeyboardInterrupt
        self._noted = True

    def __enter__(self) -> Deferred:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)
            self._active = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._active:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._active = False
        if kind is None:
            self.check()
