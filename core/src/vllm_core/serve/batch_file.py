"""Requests from a file in OpenAI's batch format, answered by the application that also serves them over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec

from vllm_core.async_llm import AsyncLLM
from vllm_core.errors import ConfigError, RequestError
from vllm_core.serve.app import create_app
from vllm_core.serve.context import Engine
from vllm_core.serve.features import Features

log = logging.getLogger("vllm_core.serve")

MAX_LINE_BYTES = 32 * 2**20
ENDPOINTS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"),
    *("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank", "/classify"),
)


class Line(msgspec.Struct):
    """One request of the file."""

    custom_id: str
    url: str
    body: dict[str, Any]
    method: str = "POST"


class Counts(NamedTuple):
    """Requests of a file."""

    answered: int
    failed: int


_line = msgspec.json.Decoder(Line).decode


async def run(input_file: str, output_file: str, *, features: Features, engine_options: Mapping[str, Any]) -> Counts:
    """Answer all lines of a file. Raises VLLMCoreError where the engine does not start."""
    with _open(input_file, "rb", sys.stdin.buffer) as lines, _open(output_file, "wb", sys.stdout.buffer) as out:
        engine = AsyncLLM(**engine_options)
        await engine.start()
        try:
            return await answer_all(engine, lines, out, features)
        finally:
            engine.shutdown()


async def answer_all(engine: Engine, lines: IO[bytes], out: IO[bytes], features: Features) -> Counts:
    """Answer lines with an engine that has started, as many at once as it runs and as many again that wait."""
    # Nobody is turned away here: no more lines are read than there are places.
    app = create_app(engine, features=features, max_queued_requests=None, web_page=False, access_log=False)
    places = asyncio.Semaphore(2 * engine.config.scheduler.max_num_seqs)
    tasks: set[asyncio.Task[None]] = set()
    names: set[str] = set()
    answered, failed, broken = 0, 0, list[BaseException]()

    async def answer(number: int, raw: bytes) -> None:
        nonlocal answered, failed
        try:
            result = await _answer(app, number, raw, names)
        finally:
            places.release()
        if result["error"] is not None or result["response"]["status_code"] >= 400:
            failed += 1
        else:
            answered += 1
        out.write(msgspec.json.encode(result) + b"\n")
        out.flush()

    def ended(task: asyncio.Task[None]) -> None:
        tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            broken.append(error)  # no line makes one: nothing can be written any more

    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(_end, tasks)
        for number, raw in enumerate(_lines(lines), start=1):
            if not raw.strip():
                continue
            await places.acquire()
            if broken:
                raise broken[0]
            task = asyncio.create_task(answer(number, raw))
            tasks.add(task)
            task.add_done_callback(ended)
        await asyncio.gather(*tasks)
        if broken:
            raise broken[0]
    return Counts(answered, failed)


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    """The lines, and of one that is too long its beginning."""
    while line := file.readline(MAX_LINE_BYTES + 1):
        yield line
        while len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
            line = file.readline(MAX_LINE_BYTES + 1)


async def _end(tasks: set[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _answer(app: Any, number: int, raw: bytes, names: set[str]) -> dict[str, Any]:
    """The answer to one line: what HTTP would have said, or why it is no request. Its id is added to ``names``."""
    result: dict[str, Any] = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": None, "response": None, "error": None}
    try:
        line = _read(number, raw, names)
    except RequestError as error:
        return {**result, "error": {"code": "invalid_request", "message": str(error)}}
    status, request_id, body = await call(app, line.url, msgspec.json.encode(line.body))
    response = {"status_code": status, "request_id": request_id, "body": body}
    return {**result, "custom_id": line.custom_id, "response": response}


def _read(number: int, raw: bytes, names: set[str]) -> Line:
    found = ""
    if len(raw) > MAX_LINE_BYTES:
        found = f"more than {MAX_LINE_BYTES} bytes"
    else:
        try:
            line = _line(raw)
        except (msgspec.DecodeError, RecursionError) as error:
            found = str(error)
        else:
            if line.custom_id in names:
                raise RequestError(
                    "Id is in use",
                    on=f"custom_id of line {number}",
                    found=f"{line.custom_id[:64]!r} in a line before",
                    expected="an id of its own for each request: answers come in any order",
                    fix="give the line another custom_id",
                )
            names.add(line.custom_id)
            if line.method == "POST" and line.url in ENDPOINTS and not line.body.get("stream"):
                return line
            found = f"{line.method[:16]} {line.url[:64]}{', streamed' if line.body.get('stream') else ''}"
    raise RequestError(
        "Line is no request",
        on=f"line {number}",
        found=found,
        expected=f"custom_id, method POST, a body without stream, and a url of: {', '.join(ENDPOINTS)}",
        fix="write one JSON request a line, as OpenAI's batch format has it",
    )


async def call(app: Any, path: str, body: bytes) -> tuple[int, str, Any]:
    """POST to an ASGI application in this process; returns the status, the request id, and the decoded answer."""
    request = [{"type": "http.request", "body": body, "more_body": False}]
    status, request_id, chunks = 0, "", []

    async def receive() -> dict[str, Any]:
        if request:
            return request.pop()
        await asyncio.Event().wait()  # the client never goes
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        nonlocal status, request_id
        if message["type"] == "http.response.start":
            status = message["status"]
            request_id = next((v.decode() for k, v in message["headers"] if k == b"x-request-id"), "")
        else:
            chunks.append(message.get("body", b""))

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
        "headers": [(b"host", b"batch"), (b"content-type", b"application/json")],
        "client": None,
        "server": ("batch", 0),
    }
    await app(scope, receive, send)
    return status, request_id, msgspec.json.decode(b"".join(chunks))


@contextlib.contextmanager
def _open(name: str, mode: str, standard: IO[bytes]) -> Iterator[IO[bytes]]:
    if name == "-":
        yield standard
        return
    with contextlib.ExitStack() as stack:
        try:
            file: IO[bytes] = stack.enter_context(Path(name).open(mode))
        except OSError as error:
            raise ConfigError(
                "File cannot be opened",
                on=name,
                found=error.strerror or str(error),
                expected="a file to read" if mode == "rb" else "a place to write to",
                fix="check the path",
            ) from error
        yield file
