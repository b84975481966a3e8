"""The server's process: address, TLS, start of the engine, signals, and the end in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import uvicorn

from vllm_core.async_llm import AsyncLLM
from vllm_core.errors import ConfigError
from vllm_core.serve.app import MAX_BODY_BYTES, create_app
from vllm_core.serve.context import Engine

log = logging.getLogger("vllm_core.serve")

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Where and how to serve. Port 0 takes a free one; `drain_s` is how long running requests may take at the end."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    max_body_bytes: int = MAX_BODY_BYTES
    drain_s: int = 30


class StartableEngine(Engine, Protocol):
    """An engine whose life the server leads; `AsyncLLM` is one."""

    async def start(self) -> None: ...
    def shutdown(self) -> None: ...


def run(options: ServerOptions, engine_options: Mapping[str, Any]) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status (0, or 130 for SIGINT).

    The address is taken and the certificate read before the engine starts. Raises VLLMCoreError for what is wrong with them,
    for an engine that does not start, and for one that ends while serving.
    """
    _check_tls(options)
    with _bind(options.host, options.port) as sock:
        return asyncio.run(serve(options, AsyncLLM(**engine_options), sock))


class _Server(uvicorn.Server):
    """Leaves signals to us: uvicorn raises them again at the end, before the engine could be stopped."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


class _Signals:
    """The first signal ends the start-up, or lets running requests finish; the second does not wait for them."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._start = asyncio.current_task()
        self._server: _Server | None = None
        for number in _SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)

    def restore(self) -> None:
        """Leave signals as Python has them."""
        for number in _SIGNALS:
            asyncio.get_running_loop().remove_signal_handler(number)

    def drain(self, server: _Server) -> None:
        """From now on signals are for this server."""
        self._server = server

    def _on_signal(self, number: signal.Signals) -> None:
        if self._server is None:
            assert self._start is not None, "made inside a task"
            self._start.cancel()
        elif self._server.should_exit:
            self._server.force_exit = True
        else:
            log.info("%s: no new requests; running ones finish", number.name)
            self._server.should_exit = True
        self.received = self.received or number


async def serve(options: ServerOptions, engine: StartableEngine, sock: socket.socket) -> int:
    """Start the engine, serve on a bound socket until a signal comes, stop the engine; returns the exit status."""
    signals = _Signals()
    try:
        await engine.start()
        app = create_app(engine, api_keys=options.api_keys, max_body_bytes=options.max_body_bytes)
        server = _Server(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="off",
                ssl_keyfile=options.ssl_keyfile,
                ssl_certfile=options.ssl_certfile,
                timeout_graceful_shutdown=options.drain_s,
            )
        )
        signals.drain(server)
        log.info("listening on %s", _address(options, sock))
        watcher = asyncio.create_task(_stop_with_engine(engine, server))
        await server.serve(sockets=[sock])
        watcher.cancel()
        if engine.error is not None:
            raise engine.error
    except asyncio.CancelledError:
        if signals.received is None:
            raise
    finally:
        engine.shutdown()
        signals.restore()
    return 128 + signal.SIGINT if signals.received == signal.SIGINT else 0


async def _stop_with_engine(engine: StartableEngine, server: _Server) -> None:
    """An engine that has given up does not come back: whoever runs this process should start another."""
    while engine.error is None:
        await asyncio.sleep(1.0)
    server.should_exit = True


def _bind(host: str, port: int) -> socket.socket:
    """Take the address, without listening yet: until the engine is ready, clients are refused."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
        except BaseException:
            sock.close()
            raise
    except OSError as error:
        raise ConfigError(
            "Address cannot be used",
            on=f"{host}:{port}",
            found=str(error),
            expected="a free address of this machine",
            fix="choose others with --host and --port; --port 0 takes a free port",
        ) from error
    if host not in _LOOPBACK:
        log.info("%s can be reached from other machines; --api-key and --ssl-certfile protect it", host)
    return sock


def _check_tls(options: ServerOptions) -> None:
    if options.ssl_keyfile is None and options.ssl_certfile is None:
        return
    found = "one of --ssl-keyfile and --ssl-certfile"
    if options.ssl_keyfile is not None and options.ssl_certfile is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(options.ssl_certfile, options.ssl_keyfile)
        except OSError as error:  # ssl.SSLError is one
            found = str(error)
        else:
            return
    raise ConfigError(
        "TLS cannot be set up",
        on=f"{options.ssl_certfile}, {options.ssl_keyfile}",
        found=found,
        expected="a certificate and its private key, both PEM",
        fix="give both files, or neither",
    )


def _address(options: ServerOptions, sock: socket.socket) -> str:
    scheme = "http" if options.ssl_certfile is None else "https"
    host = f"[{options.host}]" if ":" in options.host else options.host
    return f"{scheme}://{host}:{sock.getsockname()[1]}"
