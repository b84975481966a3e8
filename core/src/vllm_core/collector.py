"""Python's garbage collector in a process that holds one engine from its start to its end.

A start makes a million objects and hardly any garbage: looking through them again and again takes a tenth of its time, and once
they are there, each full collection would stop the engine for as long as it takes to look through all of them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def starting() -> Iterator[Callable[[], None]]:
    """No collection from here until the function given is called; later ones leave out what was there by then.

    At the end of the block all is as it was. Not for a process whose engines come and go: what is left out is not freed where
    it is part of a cycle.
    """
    collects = gc.isenabled()

    def ready() -> None:
        gc.freeze()
        if collects:
            gc.enable()

    gc.disable()
    try:
        yield ready
    finally:
        gc.unfreeze()
        if collects:
            gc.enable()
