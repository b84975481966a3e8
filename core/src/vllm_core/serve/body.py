"""From a request's bytes to JSON values, within limits."""

from __future__ import annotations

import gc
from typing import cast

import pydantic_core
from starlette.requests import ClientDisconnect, Request

from vllm_core.serve.errors import ClientGoneError, HTTPRequestError
from vllm_core.serve.schema import refused, short

MOST = {b",": 1 << 20, b":": 1 << 17, b"[": 1 << 17, b"{": 1 << 17}
"""Most marks outside of strings: values, keys, lists and objects of one body. So many are made in about a tenth of a second, on
the event loop, where everybody waits for it, and would wait elsewhere too: no parser lets go of the interpreter meanwhile."""


async def read_json(request: Request, max_bytes: int) -> object:
    """Read and decode the body. Raises HTTPRequestError, ClientGoneError."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # A page in a browser cannot send this type to another origin without asking first, and nobody says yes here.
    if content_type != "application/json":
        raise HTTPRequestError(
            "Body has another type",
            on="content-type",
            found=short(content_type),
            expected="application/json",
            fix="send the header content-type: application/json",
            status=415,
        )
    _within(int(request.headers.get("content-length", "0")), max_bytes)
    chunks, size = [], 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            _within(size, max_bytes)
            chunks.append(chunk)
    except ClientDisconnect:
        raise ClientGoneError from None
    return decode(b"".join(chunks))


def decode(body: bytes) -> object:
    """Decode JSON. NaN and infinity are read, so that the field that has them can be named. Raises RequestError."""
    _check_count(body)
    collects = gc.isenabled()
    gc.disable()  # else it looks through all that has been made again and again, and takes most of the time
    try:
        return cast("object", pydantic_core.from_json(body))
    except ValueError as error:
        raise refused("body", str(error), "valid JSON", "send one JSON object in UTF-8") from None
    finally:
        if collects:
            gc.enable()


def _check_count(body: bytes) -> None:
    if len(body) <= min(MOST.values()) or _exceeded(body) is None:
        return
    # Marks within strings make nothing, so strings are taken out, and before them what could hide their ends.
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in body else body
    mark = _exceeded(b"".join(bare.split(b'"')[::2]))
    if mark is not None:
        raise HTTPRequestError(
            "Body has too many values",
            on="body",
            found=f"more than {MOST[mark]} {mark.decode()!r} outside of strings",
            expected="a million values, a hundred thousand keys, lists and objects",
            fix="send several requests, or prompts as text",
            status=413,
        )


def _exceeded(body: bytes) -> bytes | None:
    return next((mark for mark, most in MOST.items() if body.count(mark) > most), None)


def _within(size: int, limit: int) -> None:
    if size > limit:
        raise HTTPRequestError(
            "Body is too large",
            on="body",
            found=f"{size} bytes or more",
            expected=f"at most {limit} bytes",
            fix="send a shorter prompt, or raise --max-body-bytes",
            status=413,
        )
