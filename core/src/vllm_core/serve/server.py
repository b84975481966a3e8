"""The server's process: address, TLS, start of the engine, signals, and the end in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import ssl
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import uvicorn

from vllm_core.async_llm import AsyncLLM
from vllm_core.errors import ConfigError
from vllm_core.replicas import Replicas
from vllm_core.serve import registered
from vllm_core.serve.app import check, create_app
from vllm_core.serve.context import Engine
from vllm_core.serve.protocol import protocol
from vllm_core.serve.settings import ServerOptions
from vllm_core.serve.tracing import make_tracing

__all__ = ["ServerOptions", "run", "serve"]

log = logging.getLogger("vllm_core.serve")

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
FAREWELL_S = 2.0
"""How long streams whose engine was stopped may take to say so."""


class StartableEngine(Engine, Protocol):
    """An engine whose life the server leads; `AsyncLLM` is one."""

    async def start(self) -> None: ...
    def shutdown(self) -> None: ...


def run(options: ServerOptions, engine_options: Mapping[str, Any]) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status (0, or 130 for SIGINT).

    The address is taken and the certificate read before the engine starts. Raises VLLMCoreError for what is wrong with them,
    for an engine that does not start, and for one that ends while serving.
    """
    check(options)
    _check_tls(options)
    with _bind(options) as sock:
        try:
            several = engine_options.get("data_parallel_size", 1) != 1
            make: type[Replicas | AsyncLLM] = Replicas if several else AsyncLLM
            engine: StartableEngine = make(step_timeout_s=options.step_timeout_s, **engine_options)
            return asyncio.run(serve(options, engine, sock))
        finally:
            if options.uds is not None:
                Path(options.uds).unlink(missing_ok=True)


class _Server(uvicorn.Server):
    """Says where it listens once it does, and leaves signals to us: uvicorn raises them again at the end, before the engine
    could be stopped."""

    address = ""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        await super().startup(sockets=sockets)
        log.info("listening on %s", self.address)

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
    tracing = make_tracing(options.otlp_traces_endpoint)
    server: _Server | None = None
    try:
        await engine.start()
        server = _Server(_config(create_app(engine, options, tracing=tracing), options))
        signals.drain(server)
        server.address = address = _address(options, sock)
        watcher = asyncio.create_task(_stop_with_engine(engine, server))
        with registered.entry(address, engine.model_names, engine.platform_info):
            await server.serve(sockets=[sock])
        watcher.cancel()
        if engine.error is not None:
            raise engine.error
    except asyncio.CancelledError:
        if signals.received is None:
            raise
    finally:
        engine.shutdown()
        if server is not None and server.server_state.tasks:  # a second signal: requests have failed now, and say so
            await asyncio.wait(server.server_state.tasks, timeout=FAREWELL_S)
        tracing.shutdown()
        signals.restore()
    return 128 + signal.SIGINT if signals.received == signal.SIGINT else 0


def _config(app: Any, options: ServerOptions) -> uvicorn.Config:
    logging.getLogger("uvicorn").setLevel(options.uvicorn_log_level.upper())
    return uvicorn.Config(
        app,
        http=protocol(options),
        ws="none",
        root_path=options.root_path,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        ssl_keyfile=options.ssl_keyfile,
        ssl_certfile=options.ssl_certfile,
        ssl_ca_certs=options.ssl_ca_certs,
        ssl_cert_reqs=options.ssl_cert_reqs,
        ssl_ciphers=options.ssl_ciphers or "TLSv1",  # uvicorn's default
        h11_max_incomplete_event_size=options.max_header_bytes,
        timeout_keep_alive=options.keep_alive_s,
        timeout_graceful_shutdown=options.drain_s,
    )


async def _stop_with_engine(engine: StartableEngine, server: _Server) -> None:
    """An engine that has given up does not come back: whoever runs this process should start another."""
    while engine.error is None:
        await asyncio.sleep(1.0)
    server.should_exit = True


def _bind(options: ServerOptions) -> socket.socket:
    """Take the address, without listening yet: until the engine is ready, clients are refused."""
    host, port = options.host, options.port
    try:
        if options.uds is not None:
            sock = socket.socket(socket.AF_UNIX)
            address: Any = options.uds
        else:
            family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            sock = socket.socket(family, kind, number)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
        except BaseException:
            sock.close()
            raise
    except OSError as error:
        raise ConfigError(
            "Address cannot be used",
            on=options.uds or f"{host}:{port}",
            found=str(error),
            expected="a free address of this machine",
            fix="choose others with --host and --port; --port 0 takes a free port",
        ) from error
    if options.uds is None and host not in _LOOPBACK:
        log.info("%s can be reached from other machines; --api-key and --ssl-certfile protect it", host)
    return sock


def _check_tls(options: ServerOptions) -> None:
    if options.ssl_keyfile is None and options.ssl_certfile is None:
        return
    found = "one of --ssl-keyfile and --ssl-certfile"
    if options.ssl_keyfile is not None and options.ssl_certfile is not None:
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile)
            if options.ssl_ca_certs is not None:
                context.load_verify_locations(options.ssl_ca_certs)
            if options.ssl_ciphers is not None:
                context.set_ciphers(options.ssl_ciphers)
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
    if options.uds is not None:
        return f"unix:{options.uds}"
    scheme = "http" if options.ssl_certfile is None else "https"
    host = f"[{options.host}]" if ":" in options.host else options.host
    return f"{scheme}://{host}:{sock.getsockname()[1]}"
