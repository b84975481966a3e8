"""From a request's bytes to JSON values, within limits."""

from __future__ import annotations

from typing import cast

import pydantic_core
from starlette.requests import ClientDisconnect, Request

from vllm_core.serve.errors import ClientGoneError, HTTPRequestError
from vllm_core.serve.schema import refused, short


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
    try:
        return cast("object", pydantic_core.from_json(body))
    except ValueError as error:
        raise refused("body", str(error), "valid JSON", "send UTF-8 JSON without lone surrogates") from None


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
