"""Exceptions as HTTP answers in OpenAI's error form."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from starlette.responses import Response

from vllm_core.errors import (
    ContextLengthError,
    DeadlineError,
    EngineDeadError,
    ModelError,
    RequestError,
    UnsupportedError,
    VLLMCoreError,
)


class HTTPRequestError(RequestError):
    """A request that HTTP has its own status for. `code` is OpenAI's, where clients look at it; `headers` go with it."""

    def __init__(
        self,
        what: str,
        *,
        on: str,
        found: str,
        expected: str,
        fix: str,
        status: int = 400,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(what, on=on, found=found, expected=expected, fix=fix)
        self.status, self.code, self.headers = status, code, dict(headers or {})


RETRY_AFTER_S = "5"
"""When to come back while the engine starts again."""


class ClientGoneError(Exception):
    """The client closed the connection; nobody reads the answer."""


class ErrorBody(msgspec.Struct, frozen=True):
    """What stands under ``error``."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(msgspec.Struct, frozen=True):
    """OpenAI's error form."""

    error: ErrorBody


INTERNAL = ErrorAnswer(ErrorBody("Internal error; the server's log has it under this request's x-request-id", "server_error"))


def status_of(error: VLLMCoreError) -> int:
    """400 for what the client can mend, 503 while the engine is away, 504 when its time is over, else 500."""
    if isinstance(error, HTTPRequestError):
        return error.status
    if isinstance(error, DeadlineError):
        return 504
    if isinstance(error, (RequestError, ModelError, UnsupportedError)):
        return 400
    return 503 if isinstance(error, EngineDeadError) else 500


def answer_of(error: VLLMCoreError) -> ErrorAnswer:
    """The body for ``error``: its four parts are the message, the object it is about is `param`."""
    status = status_of(error)
    code = error.code if isinstance(error, HTTPRequestError) else None
    if isinstance(error, ContextLengthError):
        code = "context_length_exceeded"
    if status < 500:
        kind = "rate_limit_error" if status == 429 else "invalid_request_error"
        param = None if isinstance(error, UnsupportedError) else error.on  # that is about a device
        return ErrorAnswer(ErrorBody(str(error), kind, param, code))
    if status == 504:
        return ErrorAnswer(ErrorBody(str(error), "timeout", None, "deadline_exceeded"))
    return ErrorAnswer(ErrorBody(str(error), "service_unavailable" if status == 503 else "server_error", None, code))


def headers_of(error: VLLMCoreError) -> Mapping[str, str]:
    """Headers that go with the answer for ``error``."""
    if isinstance(error, HTTPRequestError):
        return error.headers
    return {"retry-after": RETRY_AFTER_S} if isinstance(error, EngineDeadError) else {}


def json_response(body: object, status: int = 200) -> Response:
    """Encode a response struct."""
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def error_response(error: VLLMCoreError) -> Response:
    """``error`` as an HTTP answer."""
    answer = json_response(answer_of(error), status_of(error))
    answer.headers.update(headers_of(error))
    return answer
