"""What every HTTP request passes: request id, API key, access log, and an answer for what nobody expected."""

from __future__ import annotations

import hmac
import logging
import re
import time
import uuid
from collections.abc import Sequence
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_core.serve.errors import INTERNAL, HTTPRequestError, error_response, json_response

log = logging.getLogger("vllm_core.serve")

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Gate:
    """ASGI middleware. With ``api_keys``, everything below /v1 asks for one of them. Contents are never logged."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str] = ()) -> None:
        self._app = app
        self._keys = [key.encode() for key in api_keys]

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

        try:
            if self._keys and scope["path"].startswith("/v1") and not self._knows(headers.get("authorization", "")):
                await error_response(_wrong_key())(scope, receive, send_with_id)
            else:
                await self._app(scope, receive, send_with_id)
        except Exception:  # the client gets an answer, the log the cause
            log.exception("request %s failed", request_id)
            if not status:
                await json_response(INTERNAL, 500)(scope, receive, send_with_id)
        finally:
            path = quote(scope["path"])  # as it is, it could break a line of the log
            log.info("%s %s %d %.3fs %s", scope["method"], path, status, time.perf_counter() - started, request_id)

    def _knows(self, authorization: str) -> bool:
        scheme, _, given = authorization.partition(" ")
        sent = given.strip().encode("latin-1", "replace")
        # Each key is compared, so that the time does not tell which one is close.
        matches = [hmac.compare_digest(sent, key) for key in self._keys]
        return scheme.lower() == "bearer" and any(matches)


def _wrong_key() -> HTTPRequestError:
    return HTTPRequestError(
        "API key is wrong",
        on="authorization",
        found="no key, or one that this server does not know",
        expected="Bearer and a key of this server",
        fix="send the key that the server was started with",
        status=401,
        code="invalid_api_key",
    )
