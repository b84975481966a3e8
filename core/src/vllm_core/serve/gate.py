"""What every HTTP request passes: limits, request id, API key, deadline, access log, and an answer for what nobody expected."""

from __future__ import annotations

import hmac
import logging
import re
import time
import uuid
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_core.serve.caller import CALLER, Caller, deadline_of
from vllm_core.serve.errors import INTERNAL, HTTPRequestError, error_response, json_response
from vllm_core.serve.settings import AppOptions
from vllm_core.serve.tracing import Tracing

log = logging.getLogger("vllm_core.serve")

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_OPEN = frozenset(("/", "/health", "/health/live", "/health/ready", "/ping", "/version", "/metrics", "/favicon.ico"))
"""What probes and browsers ask for, and holds nothing of anybody's requests. All else asks for a key."""

_OPEN_FOLDER = "/web/"
_MAX_LOGGED = 512
"""Characters of a path in the access log."""


class Gate:
    """ASGI middleware. With API keys, what is not a probe asks for one of them. Contents are never logged."""

    def __init__(self, app: ASGIApp, options: AppOptions, tracing: Tracing) -> None:
        self._app = app
        self._options = options
        self._tracing = tracing
        self._keys = [key.encode() for key in options.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.perf_counter(), 0
        headers = Headers(scope=scope)
        request_id = headers.get("x-request-id", "")
        if _REQUEST_ID.fullmatch(request_id) is None:
            request_id = uuid.uuid4().hex

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        path = scope["path"].removeprefix(self._options.root_path)
        try:
            self._check_form(headers, scope)
            tenant = self._tenant(headers, path)
            deadline = deadline_of(headers, self._options.request_timeout_s)
            with self._tracing.request(scope["method"], path, headers, request_id, lambda: status) as trace:
                token = CALLER.set(Caller(request_id, tenant, deadline, trace))
                try:
                    await self._app(_as_get(scope), receive, send_with_id)
                finally:
                    CALLER.reset(token)
        except HTTPRequestError as error:
            await error_response(error)(scope, receive, send_with_id)
        except Exception:  # the client gets an answer, the log the cause
            log.exception("request %s failed", request_id)
            if not status:
                await json_response(INTERNAL, 500)(scope, receive, send_with_id)
        finally:
            if self._options.access_log:
                shown = quote(scope["path"][:_MAX_LOGGED])  # as it is, it could break a line of the log
                seconds = time.perf_counter() - started
                log.info("%s %s %d %.3fs %s", scope["method"], shown, status, seconds, request_id)

    def _check_form(self, headers: Headers, scope: Scope) -> None:
        """Refuse what proxies and servers may read differently, and close the connection behind it."""
        count, limits, fix = len(headers.raw), self._options, "leave all but one out"
        size = len(scope["raw_path"]) + len(scope["query_string"]) + sum(len(name) + len(value) for name, value in headers.raw)
        if count > limits.max_headers or size > limits.max_header_bytes:
            found, fix = f"{count} headers, {size} bytes", "send fewer or shorter headers, or raise the server's limits"
            expected, status = f"at most {limits.max_headers} headers and {limits.max_header_bytes} bytes", 431
        elif scope["http_version"] not in ("1.0", "1.1"):
            found, expected, status = f"HTTP {scope['http_version']}", "HTTP 1.1", 505
            fix = "let the client, or the proxy before this server, speak HTTP 1.1"
        elif "transfer-encoding" in headers and "content-length" in headers:
            found, expected, status = "a length and a transfer encoding", "one of them", 400
        elif len(headers.getlist("host")) > 1:
            found, expected, status = "several hosts", "one host", 400
        else:
            return
        raise HTTPRequestError(
            "Request's headers are refused",
            on="headers",
            found=found,
            expected=expected,
            fix=fix,
            status=status,
            headers={"connection": "close"},
        )

    def _tenant(self, headers: Headers, path: str) -> str:
        """Which key was sent: its number, from 1. Raises HTTPRequestError where one is needed and none is right."""
        if not self._keys:
            return "0"
        scheme, _, given = headers.get("authorization", "").partition(" ")
        text = given if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        sent = text.strip().encode("latin-1", "replace")
        # Each key is compared, so that the time does not tell which one is close.
        matches = [hmac.compare_digest(sent, key) for key in self._keys]
        if any(matches):
            return str(matches.index(True) + 1)
        if path in _OPEN or path.startswith(_OPEN_FOLDER):
            return "0"
        raise _wrong_key()


def _as_get(scope: Scope) -> Scope:
    """HEAD is GET whose body the HTTP library keeps to itself; monitors ask with it."""
    return {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope


def _wrong_key() -> HTTPRequestError:
    return HTTPRequestError(
        "API key is wrong",
        on="authorization",
        found="no key, or one that this server does not know",
        expected="Bearer and a key of this server",
        fix="send the key that the server was started with",
        status=401,
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )
