"""A server as a child process, and a client for it that knows nothing but HTTP."""

from __future__ import annotations

import atexit
import http.client
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

from vllm_conformance.case import Subject
from vllm_conformance.cases.runs import models
from vllm_conformance.cases.runs.expect import first_dtype
from vllm_conformance.subject import denied_by

NAME = "tiny"
MAX_LEN = 256
SLOTS = 4
START_LIMIT_S = 150.0
ANSWER_LIMIT_S = 60.0
_numbers = itertools.count()
_LISTENING = re.compile(r"listening on http://127\.0\.0\.1:(\d+)")


class Server:
    """`vllm-core serve` on the tiny Llama, with four slots."""

    def __init__(self, subject: Subject) -> None:
        folder = models.folder_of("llama")
        if not (folder / "tokenizer.json").exists():
            models.write_tokenizer(folder)
        self.dtype = first_dtype(subject)
        options = {
            "--platform": subject.platform,
            "--device-ids": subject.facts.id,
            "--dtype": self.dtype,
            "--max-model-len": str(MAX_LEN),
            "--max-num-seqs": str(SLOTS),
            "--kv-cache-memory-bytes": str(32 << 20),
            "--served-model-name": NAME,
            "--port": "0",
            "--drain-s": "20",
        }
        words = [word for pair in options.items() for word in pair]
        words += [word for name in denied_by(subject.options) for word in ("--deny-provider", name)]
        command = [sys.executable, "-m", "vllm_core.cli.main", "serve", str(folder), *words, "--strict"]
        self._log = models.scratch() / f"server-{next(_numbers)}.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=dict(os.environ))
        self.port = self._port()

    def _port(self) -> int:
        """Wait until it takes connections. Raises AssertionError where the server ends, or does not come."""
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            found = _LISTENING.search(self.log())
            if found and _accepts(int(found[1])):
                return int(found[1])
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended with status {self.process.returncode}: {self.log()[-1000:]}")
            time.sleep(0.05)
        self.kill()
        raise AssertionError(f"the server is not ready after {START_LIMIT_S:g} s: {self.log()[-1000:]}")

    def log(self) -> str:
        """What it has printed."""
        return self._log.read_text("utf-8", "replace")

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self.process.poll() is None

    def stop(self) -> None:
        """Ask it to end, and wait: its engine ends with it."""
        self.process.terminate()
        self.process.wait()

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.wait()

    # -- client

    @contextmanager
    def open(self, method: str, path: str, body: bytes | None = None) -> Iterator[http.client.HTTPResponse]:
        """An answer whose body has not been read; leaving early closes the connection."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_LIMIT_S)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            yield connection.getresponse()
        finally:
            connection.close()

    def get(self, path: str) -> tuple[int, str]:
        """Status and text."""
        with self.open("GET", path) as answer:
            return answer.status, answer.read().decode("utf-8")

    def post(self, path: str, body: bytes) -> tuple[int, Any]:
        """Status and JSON."""
        with self.open("POST", path, body) as answer:
            return answer.status, json.loads(answer.read())

    def complete(self, **fields: Any) -> tuple[int, Any]:
        """A text completion."""
        return self.post("/v1/completions", completion(**fields))

    def pieces(self, **fields: Any) -> Generator[Any, None, None]:
        """The events of a streamed completion, without the last, ``[DONE]``. Raises AssertionError where that is missing."""
        with self.open("POST", "/v1/completions", completion(stream=True, **fields)) as answer:
            if answer.status != 200:
                raise AssertionError(f"a stream was answered with {answer.status}: {answer.read()[:300]!r}")
            for line in answer:
                if line.startswith(b"data: "):
                    if line.strip() == b"data: [DONE]":
                        return
                    yield json.loads(line.removeprefix(b"data: "))
        raise AssertionError("a stream ended without [DONE]")

    def gauges(self) -> dict[str, float]:
        """Requests running and waiting, and the share of KV blocks in use."""
        _, text = self.get("/metrics")
        names = {
            "running": "vllm:num_requests_running",
            "waiting": "vllm:num_requests_waiting",
            "kv": "vllm:kv_cache_usage_perc",
        }
        found = {}
        for key, name in names.items():
            line = next((line for line in text.splitlines() if line.startswith(name + "{")), None)
            if line is None:
                raise AssertionError(f"/metrics has no {name}")
            found[key] = float(line.rsplit(" ", 1)[1])
        return found

    def idle_within(self, limit_s: float) -> str:
        """Wait until nothing runs and no block is in use; says what is left at the limit, or nothing."""
        deadline = time.monotonic() + limit_s
        while True:
            gauges = self.gauges()
            if not any(gauges.values()):
                return ""
            if time.monotonic() > deadline:
                return (
                    f"after {limit_s:g} s {gauges['running']:g} run, {gauges['waiting']:g} wait, KV use is {gauges['kv']:.3f}"
                )
            time.sleep(0.05)


def _accepts(port: int) -> bool:
    """The address is printed a moment before connections are taken."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
    except ConnectionRefusedError:
        return False
    return True


def completion(**fields: Any) -> bytes:
    """A greedy completion with token ids in the answer, that nothing ends early."""
    return json.dumps({"model": NAME, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **fields}).encode()


_shared: dict[str, Server] = {}


def server_of(subject: Subject) -> Server:
    """The server that this process's cases share; a new one where it has ended."""
    found = _shared.get(subject.platform)
    if found is None or not found.alive:
        found = _shared[subject.platform] = Server(subject)
        atexit.register(found.stop)
    return found
