"""The HTTP connection: uvicorn's, with an end for clients that send, or read, too slowly, and a short way for streams."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from vllm_core.serve.stream import PIECE

if TYPE_CHECKING:
    from vllm_core.serve.settings import ServerOptions


def protocol(options: ServerOptions) -> type[H11Protocol]:
    """The connection class for a server of these ``options``; uvicorn makes its instances."""

    class TimedProtocol(H11Protocol):
        """Closes a connection on which nothing comes, or whose answer is not read, for too long."""

        _incoming: asyncio.TimerHandle | None = None
        _unread: asyncio.TimerHandle | None = None
        _body = False

        def connection_made(self, transport: Any) -> None:
            """Start the time of the first request's headers."""
            super().connection_made(transport)
            self._await(options.header_timeout_s)

        def data_received(self, data: bytes) -> None:
            """Time the headers from their first byte, then the body from theirs; stop when the request is whole."""
            if self._incoming is None and (self.cycle is None or self.cycle.response_complete):
                self._await(options.header_timeout_s)
            super().data_received(data)
            if self.cycle is None or self.cycle.response_complete:
                return
            if not self.cycle.more_body:
                self._stop("_incoming")
                self._body = False
            elif not self._body:
                self._body = True
                self._await(options.body_timeout_s)

        def handle_events(self) -> None:
            """Offer the short way to the request that begins, if one does."""
            super().handle_events()
            cycle = self.cycle
            if cycle is not None and not cycle.response_started and cycle.scope["http_version"] == "1.1":
                extensions: Any = cycle.scope.setdefault("extensions", {})
                extensions[PIECE] = _sender(cycle)

        def connection_lost(self, exc: Exception | None) -> None:
            """Stop all timers."""
            self._stop("_incoming")
            self._stop("_unread")
            super().connection_lost(exc)

        def pause_writing(self) -> None:
            """The client does not read: its time starts."""
            super().pause_writing()
            self._stop("_unread")
            self._unread = self.loop.call_later(options.write_timeout_s, self._abort)

        def resume_writing(self) -> None:
            """It reads again."""
            self._stop("_unread")
            super().resume_writing()

        def _await(self, seconds: float) -> None:
            self._stop("_incoming")
            self._incoming = self.loop.call_later(seconds, self._close)

        def _close(self) -> None:
            self._incoming = None
            if not self.transport.is_closing():
                self.transport.close()

        def _abort(self) -> None:
            self._unread = None
            self.transport.abort()

        def _stop(self, name: str) -> None:
            timer = getattr(self, name)
            if timer is not None:
                timer.cancel()
                setattr(self, name, None)

    return TimedProtocol


def _sender(cycle: Any) -> Callable[[bytes], Awaitable[None]]:
    """Sends pieces of a body as HTTP/1.1 chunks (RFC 9112, 7.1), straight to the transport and under its flow control.

    Middleware and h11 would cost as much for each as all that makes it. h11 has sent the head, and sends the end: what it keeps
    of a chunked body in between is nothing.
    """
    flow, write = cycle.flow, cycle.transport.write

    async def send(data: bytes) -> None:
        if flow.write_paused and not cycle.disconnected:
            await flow.drain()
        if data and not cycle.disconnected:
            write(b"%x\r\n%b\r\n" % (len(data), data))

    return send
