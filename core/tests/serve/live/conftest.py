"""Servers as processes on a model that computes nothing, and clients that speak HTTP over plain sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from vllm_core.bench.host import write_null_model

START_S = 240.0


@dataclass
class Served:
    """A running `vllm-core serve`; `url` is where it listens."""

    process: subprocess.Popen[str]
    url: str
    log: list[str]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def engine_pid(self) -> int:
        """The engine's process: the server's only child."""
        (pid,) = children(self.process.pid, "engine_main")
        return pid

    def metrics(self, **options: Any) -> Counter[str]:
        """Samples by name, and by name/label for those that have another label than the model's; added up by name."""
        found: Counter[str] = Counter()
        for line in httpx.get(f"{self.url}/metrics", timeout=60, trust_env=False, **options).text.splitlines():
            match = re.match(r"([\w:]+)(\{.*\})? (\S+)", line)
            if match:
                found[match[1]] += float(match[3])
                for value in re.findall(r'(?:finished_reason|kind)="(\w+)"', match[2] or ""):
                    found[f"{match[1]}/{value}"] += float(match[3])
        return found

    def is_idle(self) -> bool:
        """No request runs or waits, and no block is held."""
        found = self.metrics()
        if "vllm:num_requests_running" not in found:
            return False
        return not any(
            found[f"vllm:{name}"] for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        )

    def resident_mib(self) -> int:
        """Memory of the server and its engine."""
        pages = 0
        for pid in (self.process.pid, self.engine_pid):
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") >> 20

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=60)


def children(pid: int, name: str) -> list[int]:
    """Processes that ``pid`` started whose command line has ``name``."""
    found = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                with contextlib.suppress(FileNotFoundError):
                    if name in Path(f"/proc/{child}/cmdline").read_text():
                        found.append(int(child))
    return found


@contextlib.contextmanager
def serving(model: Path, cache: Path, *options: str) -> Iterator[Served]:
    """Start a server, wait until it listens, and stop it at the end."""
    command = [sys.executable, "-m", "vllm_core.cli.main", "serve", str(model), "--port", "0", *options]
    environment = {k: v for k, v in os.environ.items() if k not in ("VLLM_CORE_LOG_LEVEL", "VLLM_CORE_API_KEY")}
    environment |= {"VLLM_CORE_CACHE": str(cache)}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    log: list[str] = []
    reader = threading.Thread(target=lambda: log.extend(iter(process.stderr.readline, "")), daemon=True)  # type: ignore[union-attr]
    reader.start()
    try:
        yield Served(process, _address(process, log), log)
    finally:
        process.kill()
        process.wait()
        reader.join()
        process.stderr.close()  # type: ignore[union-attr]


def _address(process: subprocess.Popen[str], log: list[str]) -> str:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        for line in log:
            match = re.search(r"listening on (https?://\S+)", line)
            if match:
                return match[1]
        if process.poll() is not None:
            break
        time.sleep(0.05)
    raise AssertionError("the server did not start:\n" + "".join(log))


@pytest.fixture(scope="session")
def null_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_null_model(tmp_path_factory.mktemp("null"))


SMALL = ("--load-format", "dummy", "--kv-cache-memory-bytes", "50000000", "--max-num-seqs", "256")


@pytest.fixture(scope="session")
def start(null_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Starts a server of the test's own, with options."""
    cache = tmp_path_factory.mktemp("cache")
    return lambda *options, model=null_model: serving(model, cache, *SMALL, *options)


@pytest.fixture(scope="package")
def served(start: Callable[..., Any]) -> Iterator[Served]:
    """One server for all tests that leave it as they found it."""
    with start("--max-queued-requests", "1000") as server:
        yield server


@dataclass
class Outcome:
    """What became of one request: its status, the events of its stream, whether it ended as a stream does."""

    status: int = 0
    events: int = 0
    ended: bool = False
    error: str = ""
    left: bool = False
    body: bytes = b""

    @property
    def is_clean(self) -> bool:
        """Answered whole, refused with a status, failed with an error, or left by its client."""
        if self.left:
            return True
        return self.status >= 400 if self.status != 200 else self.ended or bool(self.error)


@dataclass
class Streams:
    """Streams over plain sockets: cheap enough to run hundreds beside the server."""

    port: int
    outcomes: list[Outcome] = field(default_factory=list)

    async def stream(
        self, max_tokens: int, *, leave_after: int | None = None, path: str = "/v1/completions", **more: Any
    ) -> Outcome:
        """Send a request and read its stream; leave after so many events, without a word."""
        outcome = Outcome()
        body = {"prompt": [1, 2, 3], "max_tokens": max_tokens, "ignore_eos": True, "stream": True, **more}
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError as error:
            outcome.status, outcome.error = 503, str(error)
            self.outcomes.append(outcome)
            return outcome
        try:
            writer.write(request(path, json.dumps(body).encode()))
            head = await reader.readuntil(b"\r\n\r\n")
            outcome.status = int(head.split()[1])
            async for line in _lines(reader):
                outcome.body += line if outcome.status != 200 else b""
                if b'data: {"error"' in line:
                    outcome.error = line.decode()
                elif b"data: [DONE]" in line:
                    outcome.ended = True
                elif b"data: " in line:
                    outcome.events += 1
                if leave_after is not None and outcome.events >= leave_after:
                    outcome.left = True
                    break
        except (OSError, asyncio.IncompleteReadError) as error:
            outcome.error = f"{type(error).__name__}: {error}"
        finally:
            writer.transport.abort() if outcome.left else writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        self.outcomes.append(outcome)
        return outcome


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while line := await reader.readline():
        yield line


def request(path: str, body: bytes, *headers: str, method: str = "POST") -> bytes:
    """The bytes of a request that closes its connection."""
    lines = [f"{method} {path} HTTP/1.1", "host: test", "connection: close", *headers]
    if not any(line.lower().startswith("content-length") for line in headers):
        lines.append(f"content-length: {len(body)}")
    lines.append("content-type: application/json")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@pytest.fixture
def streams(served: Served) -> Streams:
    return Streams(served.port)


@pytest.fixture
def children_of() -> Callable[[int, str], list[int]]:
    return children


@pytest.fixture
def streams_on() -> Callable[[Served], Streams]:
    return lambda server: Streams(server.port)


@pytest.fixture
def settled() -> Callable[..., Any]:
    """Waits, the test's time limit being the limit."""

    async def wait(condition: Callable[[], bool]) -> None:
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.1)

    return wait
