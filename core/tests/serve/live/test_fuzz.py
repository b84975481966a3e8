"""Bytes that are no proper request: oversized, malformed, smuggled, slow. The server refuses or closes, and serves on."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator
from typing import Any

import pytest

GOOD = json.dumps({"prompt": [1, 2], "max_tokens": 2}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n"
LENGTH = b"content-length: %d\r\n" % len(GOOD)

CASES: dict[str, tuple[bytes, set[int]]] = {
    "no http": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)), {400}),
    "no version": (b"GET /health\r\n\r\n", {400}),
    "version 9": (b"GET /health HTTP/9.9\r\nhost: a\r\n\r\n", {400, 505}),
    "no host": (b"GET /health HTTP/1.1\r\n\r\n", {400}),
    "two hosts": (b"GET /health HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", {400}),
    "long line": (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nhost: a\r\n\r\n", {400, 431}),
    "long header": (b"GET /health HTTP/1.1\r\nhost: a\r\nx: " + b"a" * 100_000 + b"\r\n\r\n", {400, 431}),
    "many headers": (b"GET /health HTTP/1.1\r\nhost: a\r\n" + b"x: y\r\n" * 500 + b"\r\n", {431}),
    "null in header": (b"GET /health HTTP/1.1\r\nhost: a\r\nx: \x00\r\n\r\n", {400}),
    "space before colon": (HEAD + b"content-length : 5\r\n\r\n" + GOOD, {400}),
    "folded header": (b"GET /health HTTP/1.1\r\nhost: a\r\nx: a\r\n b\r\n\r\n", {200, 400}),
    "bare line feeds": (b"GET /health HTTP/1.1\nhost: a\n\n", {200, 400}),
    "length and chunks": (HEAD + LENGTH + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n", {400}),
    "two lengths": (HEAD + LENGTH + b"content-length: 3\r\n\r\n" + GOOD, {400}),
    "negative length": (HEAD + b"content-length: -5\r\n\r\n", {400}),
    "huge length": (HEAD + b"content-length: 99999999999999999999999\r\n\r\n", {400, 413}),
    "length in hex": (HEAD + b"content-length: 0x10\r\n\r\n" + GOOD, {400}),
    "odd encoding": (HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n", {400, 501}),
    "obfuscated encoding": (HEAD + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n", {400, 501}),
    "bad chunk": (HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\nabc\r\n0\r\n\r\n", {400}),
    "huge chunk": (HEAD + b"transfer-encoding: chunked\r\n\r\nffffffffffffffffff\r\n", {400, 413}),
    "declared 1 TiB": (HEAD + b"content-length: 1099511627776\r\n\r\n{", {413}),
    "deep json": (HEAD + b"content-length: 400000\r\n\r\n" + b"[" * 400_000, {413}),
    "deep but short json": (HEAD + b"content-length: 100000\r\n\r\n" + b"[" * 100_000, {400}),
    "upgrade": (b"GET / HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n", {200, 400, 426}),
    "absolute target": (b"GET http://other/health HTTP/1.1\r\nhost: a\r\n\r\n", {200, 400, 404}),
    "dots": (b"GET /v1/../../etc/passwd HTTP/1.1\r\nhost: a\r\n\r\n", {400, 404}),
    "percent nonsense": (b"GET /%zz%00%ff HTTP/1.1\r\nhost: a\r\n\r\n", {400, 404}),
}


def answer_to(port: int, data: bytes, *, cut: bool = False) -> bytes:
    """What comes back until the server closes or has nothing more to say; ``cut`` ends our side behind the data."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as sock:
        found = b""
        try:
            sock.sendall(data)
            if cut:
                sock.shutdown(socket.SHUT_WR)
            while part := sock.recv(65536):
                found += part
                sock.settimeout(0.3)
        except (TimeoutError, ConnectionError):
            pass  # it keeps the connection for another request, or has closed it: both are answers
        return found


@pytest.fixture(scope="module")
def served(start: Any) -> Iterator[Any]:
    """One of this file's own: clients of a busy machine may need longer than these limits."""
    with start("--header-timeout-s", "2", "--body-timeout-s", "2") as server:
        yield server


def statuses(data: bytes) -> list[int]:
    return [int(part.split(b" ", 1)[0]) for part in data.split(b"HTTP/1.1 ")[1:]]


def test_every_malformed_request_is_refused_or_closed_and_none_reaches_the_engine(served: Any) -> None:
    before = served.metrics()["vllm:prompt_tokens_total"]
    wrong = {}
    for name, (data, allowed) in CASES.items():
        found = statuses(answer_to(served.port, data))
        if not (found == [] or (len(found) == 1 and found[0] in allowed)):
            wrong[name] = found
    assert wrong == {}
    after = served.metrics()["vllm:prompt_tokens_total"]
    assert after == before


def test_a_smuggled_request_is_not_served(served: Any) -> None:
    """What a proxy takes for the body of one request must not become another."""
    hidden = b"POST /reset_prefix_cache HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n"
    for head in (
        b"content-length: %d\r\ntransfer-encoding: chunked\r\n" % (len(hidden) + 5),
        b"transfer-encoding: chunked\r\ncontent-length: 4\r\n",
        b"transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n",
        b"transfer-encoding:\x0bchunked\r\n",
    ):
        found = answer_to(served.port, HEAD + head + b"\r\n0\r\n\r\n" + hidden)
        assert b"success" not in found
        assert all(status >= 400 for status in statuses(found))


def test_random_bytes_and_cut_requests_leave_it_serving(served: Any) -> None:
    draw = random.Random(7)
    whole = HEAD + LENGTH + b"\r\n" + GOOD
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(draw.randint(0, 6)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        found = answer_to(served.port, bytes(data[: draw.randint(0, len(data))]), cut=True)
        assert not [status for status in statuses(found) if status >= 500 and status not in (501, 505)]
    assert statuses(answer_to(served.port, whole)) == [200]
    assert served.process.poll() is None
    assert not [line for line in served.log if "Traceback" in line]


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp", HEAD, HEAD + LENGTH + b"\r\n" + GOOD[:3]])
def test_a_request_that_never_ends_is_closed(served: Any, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as sock:
        sock.sendall(sent)
        found = b""
        while part := sock.recv(65536):
            found += part
    assert found == b""


def test_slow_clients_do_not_keep_others_out(served: Any) -> None:
    idle = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(200)]
    try:
        for sock in idle:
            sock.sendall(b"POST /v1/comple")
        assert statuses(answer_to(served.port, HEAD + LENGTH + b"connection: close\r\n\r\n" + GOOD)) == [200]
    finally:
        for sock in idle:
            sock.close()
