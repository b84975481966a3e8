"""One worker beside the leading one, as the leader sees it: its process and its channel."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from vllm_core.engine.parallel.channel import BEAT_S, Channel
from vllm_core.errors import EngineDeadError

EXIT_S = 2.0
"""How long a process may take to exit once it has closed its channel."""
KILLED_S = 5.0
"""How long a killed process may take to go. One that waits for its driver goes when that answers, which may be never."""
SILENT_S = 30.0
"""How long a worker may say nothing, once it is ready: as long as one call may keep other threads of its process waiting."""
STARTING_SILENT_S = 120.0
"""The same while it starts: a large library that comes from a slow disk is one such call."""
_STATES = {"T": "stopped by a signal", "t": "stopped by a debugger", "D": "waiting for a disk or a driver", "R": "running"}


class Worker:
    """One other worker: its process and its channel."""

    def __init__(self, rank: int, label: str, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self.rank, self.label = rank, label
        mine, theirs = socket.socketpair()
        with theirs:
            # Standard output belongs to the leader's program; Ctrl-C does too, hence a session of its own.
            self.process = subprocess.Popen(
                list(command), stdin=theirs.fileno(), stdout=2, env=dict(environ), start_new_session=True
            )
        self.channel = Channel(mine)
        self.inbox: list[tuple[int, bytes]] = []
        self.digests: dict[int, int] = {}
        self.is_ready = False
        self.heard_times = 0
        self._silent_s = 0.0

    def end(self, patience_s: float = 0.0) -> None:
        """Collect it, killed if it still runs after ``patience_s``; one that even so does not go is left to the system."""
        try:
            self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(KILLED_S)

    def heard(self) -> None:
        """Something came from it."""
        self.heard_times += 1
        self._silent_s = 0.0

    def unheard(self, seconds: float) -> EngineDeadError | None:
        """Nothing came from it for another while; the error, once that is too long.

        What is longer than two beats counts as two: then it was this process that stood still, asleep with its host.
        """
        self._silent_s += min(seconds, 2 * BEAT_S)
        limit = SILENT_S if self.is_ready else STARTING_SILENT_S
        if self._silent_s < limit:
            return None
        return EngineDeadError(
            "Worker process does not answer",
            on=self.label,
            found=f"nothing for {self._silent_s:.0f} s; the process is {self._state()}",
            expected=f"a sign of life every {BEAT_S:g} s",
            fix="see the log for what came before; a worker that a signal stopped, or whose host hangs, looks like this",
        )

    def _state(self) -> str:
        """What the kernel says of it, where it can be asked."""
        try:
            letter = Path(f"/proc/{self.process.pid}/stat").read_text("ascii").rpartition(")")[2].split()[0]
        except OSError:
            return "in a state that cannot be read"
        return _STATES.get(letter, "waiting")

    def death(self) -> EngineDeadError:
        """The error for a process that is gone without a word."""
        try:
            status = self.process.wait(timeout=EXIT_S)
        except subprocess.TimeoutExpired:
            found = "it closed its channel"
        else:
            found = f"killed by signal {-status} ({signal.strsignal(-status)})" if status < 0 else f"exit status {status}"
        return EngineDeadError(
            "Worker process is gone",
            on=self.label,
            found=found,
            expected="every worker of the engine running",
            fix="see the log for what came before; signal 9 often means that the host ran out of memory",
        )
