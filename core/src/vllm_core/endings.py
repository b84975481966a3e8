"""How an engine process ends: what its requests are told, and that it is seen to end."""

from __future__ import annotations

import asyncio
import contextlib
from asyncio.subprocess import Process

from vllm_core.engine import wire
from vllm_core.errors import EngineDeadError

KILLED_S = 10.0
"""Seconds in which a killed engine process must have gone; one with much pinned memory takes a while."""


def stopped() -> EngineDeadError:
    """What requests are told that run when the engine is shut down."""
    return EngineDeadError(
        "Engine has been stopped",
        on="engine process",
        found="a shutdown while the request ran",
        expected="a running engine",
        fix="send the request again to one that runs",
    )


def gone(status: int | None, failure: wire.Failure | None) -> EngineDeadError:
    """What requests are told whose engine process has ended, or is starting again; ``failure`` is its last word."""
    ended = "it is starting" if status is None else f"exit status {status}"
    return EngineDeadError(
        "Engine process is gone",
        on="engine process" if failure is None else failure.on,
        found=ended if failure is None else f"{failure.what}: {failure.found}",
        expected="a running engine",
        fix="see the log; send the request again once /health answers 200",
    )


def collecting(process: Process | None) -> asyncio.Task[None] | None:
    """See a killed process end, also where the loop is about to close: what belongs to it would be left open.

    Without a process, or a loop that runs, there is nobody to wait for, or to wait.
    """
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return None
    return None if process is None else loop.create_task(_collect(process))


async def _collect(process: Process) -> None:
    if process.stdin is not None:
        process.stdin.close()
    for _ in range(2):  # a loop that closes cancels its tasks once
        with contextlib.suppress(asyncio.CancelledError, asyncio.TimeoutError):
            await asyncio.wait_for(process.wait(), KILLED_S)
            return
