"""One worker beside the leading one, as the leader sees it: its process and its channel."""

from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence

from vllm_core.engine.parallel.channel import Channel
from vllm_core.errors import EngineDeadError

EXIT_S = 2.0
"""How long a process may take to exit once it has closed its channel."""


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

    def end(self, patience_s: float = 0.0) -> None:
        """Collect it, killed if it still runs after ``patience_s``."""
        try:
            self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

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
