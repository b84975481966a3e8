"""The parent's side of one child process: asks, waits within a time limit, and replaces a child that crashed or hangs."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from vllm_conformance.protocol import MAX_LINE_BYTES, Answer, Broken, Preparing, Request, Setup, decode_answer, encode
from vllm_core.errors import PlatformError
from vllm_core.registry.probe import child_environment

START_LIMIT_S = 60.0
"""What the first answer of a child may take longer: the interpreter starts."""
TAIL_BYTES = 3000
POLL_S = 0.5
PATIENCE = 5
"""How many times its limit a case may last while other work has the processors: its limit is then one of processor time."""
LEAST_SHARE = 0.05
"""Of a processor: a child that got less than this waits for something, and not for the processor."""

# What another project's switches could serve in a plugin's place; the suite's cases ask core for no fallback themselves.
FALLBACKS_OFF = {"PYTORCH_ENABLE_MPS_FALLBACK": "0", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
_KEPT = ("VLLM_CORE_CACHE", "VLLM_CORE_PROBE_TIMEOUT_S", "VLLM_CORE_OPS_PATH", "VLLM_CORE_DEMO_MODEL")


@dataclass(frozen=True, slots=True)
class Lost:
    """The child is gone: it ended by itself, or was killed at the end of a time limit."""

    outcome: Literal["CRASH", "HANG"]
    detail: str


class Worker:
    """At most one child process, started when something is asked and there is none."""

    def __init__(self, setup: Setup, environ: Mapping[str, str], prepare_limit_s: float) -> None:
        self._setup, self._environ, self._prepare_limit_s = setup, dict(environ), prepare_limit_s
        self._child: _Child | None = None

    def ask(self, request: Request, limit_s: float) -> Answer | Lost:
        """Send a request, wait for its answer. Raises PlatformError where the child says that it cannot go on."""
        start_limit_s = 0.0
        if self._child is None:
            self._child, start_limit_s = _Child(self._setup, self._environ, self._prepare_limit_s), START_LIMIT_S
        answer = self._child.ask(request, limit_s, start_limit_s)
        if isinstance(answer, Broken):
            self.close()
            raise PlatformError(answer.what, on=answer.on, found=answer.found, expected=answer.expected, fix=answer.fix)
        if isinstance(answer, Lost):
            self.close()
        return answer

    def interrupt(self) -> None:
        """Let whoever waits for an answer see that the child is gone. From any thread."""
        child = self._child
        if child is not None:
            child.end()

    def close(self) -> None:
        """End the child and whatever is in its process group."""
        if self._child is not None:
            self._child.kill()
            self._child = None


class _Clock:
    """A time limit, which counts processor time while other work has the processors."""

    def __init__(self, limit_s: float, spent_s: float) -> None:
        self._limit_s, self._began = limit_s, time.monotonic()
        self._spent_s = self._seen_s = spent_s
        self.deadline = self._began + limit_s

    def goes_on(self, spent_s: float) -> bool:
        """At the deadline: whether the child, which has used ``spent_s`` by now, wants for a processor and gets more time."""
        now = time.monotonic()
        more_s = min(self._limit_s, self._began + PATIENCE * self._limit_s - now)
        busy = spent_s - self._seen_s > LEAST_SHARE * self._limit_s
        if not busy or spent_s - self._spent_s >= self._limit_s or more_s <= 0:
            return False
        self.deadline, self._seen_s = now + more_s, spent_s
        return True


class _Child:
    def __init__(self, setup: Setup, environ: Mapping[str, str], prepare_limit_s: float) -> None:
        self._prepare_limit_s = prepare_limit_s
        self._log: IO[bytes] = tempfile.TemporaryFile(prefix="vllm-conformance-")  # noqa: SIM115 - closed by kill
        self._folder = tempfile.TemporaryDirectory(prefix="vllm-conformance-")
        requests, self._requests = os.pipe()
        self._answers, answers = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "vllm_conformance.child", str(requests), str(answers)],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            pass_fds=(requests, answers),
            env=child_environment(environ),
            cwd=self._folder.name,
            start_new_session=True,
        )
        os.close(requests)
        os.close(answers)
        self._buffer = bytearray()
        self._setup = encode(setup)

    def ask(self, request: Request, limit_s: float, start_limit_s: float) -> Answer | Lost:
        try:
            os.write(self._requests, self._setup + encode(request))
            self._setup = b""
        except BrokenPipeError:
            return self._crash()
        return self._answer(limit_s, start_limit_s)

    def _answer(self, limit_s: float, start_limit_s: float) -> Answer | Lost:
        left, what = limit_s, f"no answer within {limit_s:g} s"
        clock = _Clock(limit_s + start_limit_s, self._processor_s())
        while True:
            line = self._line(clock.deadline)
            if line is None:
                if clock.goes_on(self._processor_s(group=True)):
                    continue
                return Lost("HANG", f"{what}; it was killed{self._tail()}")
            if not line:
                return self._crash()
            answer = decode_answer(line)
            if not isinstance(answer, Preparing):
                return answer
            if answer.done:
                clock, what = _Clock(left, self._processor_s()), f"no answer within {limit_s:g} s"
            else:
                left = min(limit_s, clock.deadline - time.monotonic())
                clock = _Clock(self._prepare_limit_s, self._processor_s())
                what = f"nothing imported or opened within {self._prepare_limit_s:g} s"

    def _processor_s(self, group: bool = False) -> float:
        """Processor time of the child, or of all in its process group; 0 where the system does not tell."""
        total, own = 0, self._process.pid
        for path in Path("/proc").glob("[0-9]*/stat" if group else f"{own}/stat"):
            try:
                fields = path.read_text("ascii", "replace").rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            # Fields 5 (process group) and 14 to 17 (user and kernel time, and that of children that have ended) of proc(5).
            if int(fields[2]) == own:
                total += sum(map(int, fields[11:15]))
        return total / os.sysconf("SC_CLK_TCK")

    def _line(self, deadline: float) -> bytes | None:
        """The next line; empty where the child has ended, None at the deadline."""
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            readable, _, _ = select.select([self._answers], [], [], min(left, POLL_S))
            if readable:
                data = os.read(self._answers, 1 << 16)
                if not data or len(self._buffer) > MAX_LINE_BYTES:
                    return b""
                self._buffer += data
            elif self._process.poll() is not None:
                return b""
        line, _, rest = bytes(self._buffer).partition(b"\n")
        self._buffer = bytearray(rest)
        return line

    def _crash(self) -> Lost:
        try:
            code = self._process.wait(POLL_S)
        except subprocess.TimeoutExpired:
            return Lost("CRASH", f"it closed its pipe{self._tail()}")
        how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        return Lost("CRASH", how + self._tail())

    def _tail(self) -> str:
        """The end of what it printed."""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - TAIL_BYTES))
        text = self._log.read().decode("utf-8", "replace").strip()
        return f"\n{text}" if text else ""

    def end(self) -> None:
        """End the process group."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # the normal case after a crash

    def kill(self) -> None:
        """End the process group, wait for its first process, and let go of what was held for it."""
        self.end()
        self._process.wait()
        for number in (self._requests, self._answers):
            os.close(number)
        self._log.close()
        self._folder.cleanup()


def environment(environ: Mapping[str, str], jobs: int) -> dict[str, str]:
    """The environment of children: nobody's choice of platform, fallbacks off, the host's cores shared."""
    kept = {name: value for name, value in environ.items() if name in _KEPT or not _chooses(name)}
    threads = str(max(1, (os.cpu_count() or 1) // jobs))
    return {"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "passive", **kept, **FALLBACKS_OFF}


def _chooses(name: str) -> bool:
    return name == "VLLM_PLATFORM" or name.startswith("VLLM_CORE_")
