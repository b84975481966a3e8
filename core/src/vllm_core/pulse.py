"""Whether the engine process goes on: what it says of itself, and what its owner makes of that.

A process that has died is noticed at once. One that stands still is not: a signal stopped it, or it waits in a step for a
device that does not answer. So a thread of the engine process says every `BEAT_S` for how long the main thread has been at one
thing, and the owner ends a process that says nothing, or is at one thing, for too long.
"""

from __future__ import annotations

import contextlib
import threading
import time

import msgspec
import zmq

from vllm_core.engine import wire

BEAT_S = 1.0
"""How often the engine process says that it runs."""
SILENT_S = 30.0
"""How long it may say nothing: as long as one call may keep the other threads of its process waiting."""
STEP_TIMEOUT_S = 300.0
"""How long one step may take unless the operator says otherwise: a long prompt on a slow host takes minutes."""

decode = msgspec.msgpack.Decoder(float).decode


class Pulse:
    """Of the engine process, whose main thread calls `begin` before each thing that it does, and `rest` before it waits."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._since: float | None = None
        threading.Thread(target=self._beat, name="vllm-core-pulse", daemon=True).start()

    def begin(self) -> None:
        """Something is begun."""
        self._since = time.monotonic()

    def rest(self) -> None:
        """There is nothing to do."""
        self._since = None

    def _beat(self) -> None:
        # Sockets belong to one thread. What cannot be sent at once is not sent: an owner that does not read needs no more.
        socket = zmq.Context().socket(zmq.PUSH)
        socket.set_hwm(1)
        socket.linger = 0
        socket.connect(self._address)
        while True:
            since = self._since
            busy_s = 0.0 if since is None else time.monotonic() - since
            with contextlib.suppress(zmq.Again):
                socket.send_multipart((wire.BEAT, wire.encode(busy_s)), zmq.NOBLOCK)
            time.sleep(BEAT_S)


class Watch:
    """Of the owner: what was heard of one engine process since it was ready."""

    def __init__(self, step_timeout_s: float) -> None:
        self._step_timeout_s = step_timeout_s
        self._silent_s = self._busy_s = 0.0

    def heard(self, busy_s: float) -> None:
        """The process runs, and has been at one thing for so long."""
        self._silent_s, self._busy_s = 0.0, busy_s

    def passed(self, seconds: float) -> wire.Failure | None:
        """Another while has passed; the failure, once it has been too long.

        What is longer than two beats counts as two: then it was this process that stood still.
        """
        self._silent_s += min(seconds, 2 * BEAT_S)
        if self._silent_s >= SILENT_S:
            return hangs(f"no sign of life for {self._silent_s:.0f} s", f"one every {BEAT_S:g} s")
        if self._busy_s >= self._step_timeout_s:
            return hangs(f"one step that has taken {self._busy_s:.0f} s", f"at most {self._step_timeout_s:g} s")
        return None


def hangs(found: str, expected: str) -> wire.Failure:
    """The failure of a process that stands still."""
    return wire.Failure(
        "EngineDeadError",
        "Engine process hangs",
        "engine process",
        found,
        expected,
        "see the log for what came before; a signal may have stopped it, or its device may not answer; "
        "--step-timeout-s allows longer steps",
    )
