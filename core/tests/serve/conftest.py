"""An engine with `AsyncLLM`'s interface that says what it is told to, and clients of the application around it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from vllm_core.engine.messages import EngineStats
from vllm_core.errors import EngineDeadError, RequestError
from vllm_core.models.labels import classified
from vllm_core.outputs import (
    ClassificationRequestOutput,
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Logprob,
    RequestOutput,
)
from vllm_core.sampling_params import PoolingParams, SamplingParams
from vllm_core.serve.app import create_app

PIECES = ("Hel", "", "lo wörld")
"""One a step; the second token is part of a character."""


class FakeTokenizer:
    chat_template = "template"

    vocab_size = 64

    def encode(self, text: str, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        return [ord(c) % 64 for c in text]

    def token_text(self, token: int) -> str:
        return chr(96 + token)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(96 + i) for i in ids)

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> str:
        self.seen = (messages, options)
        return "".join(f"<{m['role']}>{m['content']}" for m in messages)


@dataclass
class FakeEngine:
    """Each prompt's answer is `PIECES`, a token a step, in one mutable output as the real engine has it."""

    runner: str = "generate"
    tokenizer: Any = field(default_factory=FakeTokenizer)
    generation_config: dict[str, Any] = field(default_factory=dict)
    scheduling_policy: str = "fcfs"
    model_names: list[str] = field(default_factory=lambda: ["fake", "alias"])
    errors: dict[Any, Exception] = field(default_factory=dict)
    """By prompt: raised instead of the first output."""
    error_after: dict[int, Exception] = field(default_factory=dict)
    """By step: raised in every request."""
    gate: asyncio.Event | None = None
    """Waited for before the second step."""
    first_gate: asyncio.Event | None = None
    """Waited for before the first."""
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    """Requests that ended before their output was finished."""
    failure: str | None = None
    is_alive: bool = True
    error: Exception | None = None
    max_model_len: int = 64
    labels: Any = None
    """The classes of a model that classifies."""
    platform_info: dict[str, str] = field(default_factory=lambda: {"platform": "fake", "dtype": "float32"})

    pieces: Sequence[str] = PIECES
    """The answer, a token a step."""
    deadlines: list[float | None] = field(default_factory=list)
    max_num_seqs: int = 256
    plan_json: bytes = b'{"platform": "fake"}'
    num_restarts: int = 0
    num_demotions: int = 1
    cache_in_use: bool = False

    start_gate: asyncio.Event | None = None
    """Waited for by `start`."""
    starts_with: Exception | None = None
    """Raised by `start`."""
    was_shut_down: bool = False

    async def start(self) -> None:
        if self.starts_with is not None:
            raise self.starts_with
        if self.start_gate is not None:
            await self.start_gate.wait()

    def shutdown(self) -> None:
        self.was_shut_down = True

    @property
    def config(self) -> Any:
        scheduler = SimpleNamespace(scheduling_policy=self.scheduling_policy, max_num_seqs=self.max_num_seqs)
        return SimpleNamespace(scheduler=scheduler, model=SimpleNamespace(model="path/of/fake"))

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str = "",
        add_special_tokens: bool = True,
        deadline: float | None = None,
    ) -> AsyncIterator[RequestOutput]:
        self.calls.append((prompt, params, request_id, priority, cache_salt, add_special_tokens))
        self.deadlines.append(deadline)
        await asyncio.sleep(0)
        self._check(prompt)
        text = prompt if isinstance(prompt, str) else None
        ids = [ord(c) % 64 for c in prompt] if isinstance(prompt, str) else list(prompt)
        sequences = [CompletionOutput(i, "", [], None, None if params.logprobs is None else []) for i in range(params.n)]
        output = RequestOutput(request_id, text, ids, sequences, False, num_cached_tokens=1)
        try:
            for step, piece in enumerate(self.pieces):
                gate = {0: self.first_gate, 1: self.gate}.get(step)
                if gate is not None:
                    await gate.wait()
                if step in self.error_after:
                    raise self.error_after[step]
                for sequence in sequences:
                    self._extend(sequence, step, piece, params)
                output.finished = step == len(self.pieces) - 1
                if output.finished:
                    output.error = self.failure
                    output.metrics.update(queue_s=0.5, prefill_s=1.0, decode_s=2.0)
                yield output
                await asyncio.sleep(0)
        finally:
            if not output.finished:
                self.closed.append(request_id)

    def _check(self, prompt: str | Sequence[int]) -> None:
        """As the real one it takes nothing but text and ids."""
        if not isinstance(prompt, str) and not all(type(token) is int for token in prompt):
            raise RequestError("Prompt has a wrong type", on="prompt", found=repr(prompt), expected="ids", fix="send ids")
        key = prompt if isinstance(prompt, str) else tuple(prompt)
        if key in self.errors:
            raise self.errors[key]

    def _extend(self, sequence: CompletionOutput, step: int, piece: str, params: SamplingParams) -> None:
        token = 10 + step
        sequence.text += piece
        sequence.token_ids.append(token)
        if sequence.logprobs is not None:
            shown = piece or "\ufffd"
            entry = {token: Logprob(-0.5 * step, 2, shown), 1: Logprob(-0.25, 1, "a"), 3: Logprob(float("-inf"), 3, "b")}
            sequence.logprobs.append(entry if params.logprobs else {token: Logprob(-0.5 * step, 2, shown)})
        if step == len(self.pieces) - 1:
            sequence.finish_reason, sequence.stop_reason = "stop", "x" if params.stop_strings else None

    async def embed(
        self, prompt: str | Sequence[int], params: PoolingParams, request_id: str, *, deadline: float | None = None
    ) -> EmbeddingRequestOutput:
        self.calls.append((prompt, params, request_id))
        try:
            await asyncio.sleep(0)
            self._check(prompt)
            if self.gate is not None:
                await self.gate.wait()
        except BaseException:
            self.closed.append(request_id)
            raise
        vector = [0.5, -0.25, float(len(prompt))]
        return EmbeddingRequestOutput(request_id, [1] * len(prompt), EmbeddingOutput(vector), error=self.failure)

    async def classify(
        self, prompt: str | Sequence[int], request_id: str, *, deadline: float | None = None
    ) -> ClassificationRequestOutput:
        found = await self.embed(prompt, PoolingParams(), request_id, deadline=deadline)
        return classified(found, self.labels)

    async def stats(self) -> EngineStats:
        if not self.is_alive:
            raise dead()
        return EngineStats(
            running=2,
            waiting=3,
            kv_usage=0.25,
            prefix_queries=10,
            prefix_hits=4,
            preemptions=1,
            prompt_tokens=7,
            calls_by_kind={"kernel": 90, "reference": 5, "host": 2},
        )

    async def reset_prefix_cache(self) -> bool:
        return not self.cache_in_use


def dead() -> EngineDeadError:
    return EngineDeadError("Engine process is gone", on="engine process", found="exit status -9", expected="one", fix="wait")


@dataclass
class Client:
    """Sends JSON, or bytes as they are, to the application."""

    app: Any
    headers: dict[str, str] = field(default_factory=dict)

    async def send(self, method: str, path: str, **options: Any) -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://test") as client:
            return await client.request(method, path, **options)

    async def get(self, path: str, **options: Any) -> httpx.Response:
        return await self.send("GET", path, **options)

    async def post(self, path: str, body: object, **headers: str) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.send("POST", path, content=content, headers={"content-type": "application/json", **headers})


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def pooling_engine() -> FakeEngine:
    return FakeEngine(runner="pooling")


@pytest.fixture
def make_client() -> Callable[..., Client]:
    return lambda engine, **options: Client(create_app(engine, **options))


@pytest.fixture
def client(engine: FakeEngine, make_client: Callable[..., Client]) -> Client:
    return make_client(engine)


@pytest.fixture
def engine_dead() -> EngineDeadError:
    return dead()


@pytest.fixture
def leaver() -> Callable[..., Any]:
    """Sends a request whose client leaves once ``leave`` is set; returns what was sent to it."""

    async def send_and_leave(app: Any, path: str, body: object, leave: asyncio.Event) -> list[dict[str, Any]]:
        content = json.dumps(body).encode()
        inbox = [{"type": "http.request", "body": content, "more_body": False}]
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            if inbox:
                return inbox.pop()
            await leave.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"host", b"test"), (b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("test", 80),
        }
        await app(scope, receive, send)
        return sent

    return send_and_leave


@pytest.fixture
def parse_events() -> Callable[[str], list[Any]]:
    """The JSON of each event; the last one is [DONE]."""

    def parse(text: str) -> list[Any]:
        events = text.split("\n\n")
        assert events.pop() == ""
        assert events.pop() == "data: [DONE]"
        return [json.loads(event.removeprefix("data: ")) for event in events]

    return parse


KEY = "test-key"
"""Of servers that run as processes with a real model."""
START_S = 240


@contextmanager
def serving(model: Path, log: Path, *options: str) -> Iterator[str]:
    """Run `vllm-core serve` on a free port; yields its address, and checks that SIGTERM ends it in order."""
    command = [sys.executable, "-m", "vllm_core.cli.main", "serve", str(model), "--port", "0", "--api-key", KEY, *options]
    env = {name: value for name, value in os.environ.items() if name != "VLLM_CORE_LOG_LEVEL"}
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out, env=env) as process:
        try:
            yield _address(process, log)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, log.read_text()
        finally:
            process.kill()


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    limit = time.monotonic() + START_S
    while time.monotonic() < limit and process.poll() is None:
        found = re.search(r"listening on (http://\S+)", log.read_text())
        if found is not None:
            return found[1]
        time.sleep(0.1)
    raise AssertionError(f"the server did not start: {log.read_text()}")


@pytest.fixture(scope="session")
def serve_model() -> Callable[..., Any]:
    """A context manager that serves a model's folder or file, with options; its key is `KEY`."""
    return serving


@pytest.fixture(scope="package")
def server(model_file: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server with a model that was trained, for all clients."""
    names = ("--served-model-name", "smol", "--served-model-name", "demo")
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    sizes = ("--dtype", "float32", "--max-model-len", "512", "--kv-cache-memory-bytes", "200000000")
    model = model_file("SmolLM2-135M-Instruct.Q4_1.gguf")
    with serving(model, tmp_path_factory.mktemp("serve") / "log", *names, *tools, *sizes) as address:
        yield address
