"""Work beside a start."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def begun(work: Callable[[], T], name: str) -> Future[T]:
    """Begin ``work`` in a thread that nobody waits for but who asks for its result.

    Not in a pool: that waits for its threads where an interrupt leaves it, and once more at the interpreter's end, and a thread
    in the middle of an import may wait for a lock that the interrupted one has kept.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - raised again where the result is asked for
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
