"""The server's process: what is wrong is said before the engine starts, and signals end it in order."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from vllm_core.errors import ConfigError, UnknownOptionError
from vllm_core.serve import server

# An option that no engine has: an engine that is started all the same says so.
NO_ENGINE: dict[str, Any] = {"model": "m", "no_such_option": 1}


def test_an_address_in_use_is_refused_before_the_engine_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match="in use") as caught:
            server.run(server.ServerOptions(port=port), NO_ENGINE)
    assert caught.value.on == f"127.0.0.1:{port}"


@pytest.mark.parametrize("host", ["256.0.0.1", "no.such.host.invalid", "192.0.2.1"])
def test_an_address_of_no_machine_here_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="Address cannot be used"):
        server.run(server.ServerOptions(host=host, port=0), NO_ENGINE)


@pytest.mark.parametrize(("key", "cert"), [("k.pem", None), (None, "c.pem")])
def test_half_of_a_certificate_is_refused(key: str | None, cert: str | None) -> None:
    with pytest.raises(ConfigError, match="one of --ssl-keyfile and --ssl-certfile"):
        server.run(server.ServerOptions(port=0, ssl_keyfile=key, ssl_certfile=cert), NO_ENGINE)


def test_a_broken_certificate_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.pem").write_text("not a certificate")
    options = server.ServerOptions(port=0, ssl_keyfile=str(tmp_path / "c.pem"), ssl_certfile=str(tmp_path / "c.pem"))
    with pytest.raises(ConfigError, match="TLS cannot be set up"):
        server.run(options, NO_ENGINE)


def test_an_engine_that_does_not_start_is_an_error_and_frees_the_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for _ in range(2):
        with pytest.raises(UnknownOptionError, match="no_such_option"):
            server.run(server.ServerOptions(port=port), NO_ENGINE)


def test_addresses_are_shown_as_clients_write_them() -> None:
    with socket.socket(socket.AF_INET6) as sock:
        sock.bind(("::1", 0))
        port = sock.getsockname()[1]
        assert server._address(server.ServerOptions(host="::1"), sock) == f"http://[::1]:{port}"
        assert server._address(server.ServerOptions(host="h", ssl_certfile="c"), sock) == f"https://h:{port}"


class Running:
    """A server on a free port of this machine, in a task of the test."""

    def __init__(self, engine: Any, sock: socket.socket, **options: Any) -> None:
        self.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        self.task = asyncio.create_task(server.serve(server.ServerOptions(**options), engine, sock))

    async def is_ready(self) -> None:
        async with httpx.AsyncClient() as client:
            while True:
                try:
                    await client.get(f"{self.url}/health")
                except httpx.ConnectError:
                    await asyncio.sleep(0.01)
                else:
                    return

    async def refuses_connections(self) -> None:
        async with httpx.AsyncClient() as client:
            while True:
                try:
                    await client.get(f"{self.url}/health")
                except httpx.TransportError:
                    return


@asynccontextmanager
async def running(engine: Any, **options: Any) -> AsyncIterator[Running]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield Running(engine, sock, **options)


def interrupt(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.anyio
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
async def test_a_signal_ends_an_idle_server_and_its_engine(engine: Any, number: signal.Signals, status: int) -> None:
    async with running(engine) as here:
        await here.is_ready()
        interrupt(number)
        assert await here.task == status
    assert engine.was_shut_down


@pytest.mark.anyio
async def test_running_requests_finish_after_a_signal_and_new_ones_are_refused(engine: Any) -> None:
    engine.gate = asyncio.Event()
    async with running(engine) as here, httpx.AsyncClient(timeout=None) as client:
        await here.is_ready()
        stream = asyncio.create_task(client.post(f"{here.url}/v1/completions", json={"prompt": "a", "stream": True}))
        while not engine.calls:
            await asyncio.sleep(0.01)
        interrupt(signal.SIGTERM)
        await here.refuses_connections()
        assert not engine.was_shut_down, "the engine is needed until the last request has ended"
        engine.gate.set()
        assert (await stream).text.endswith("data: [DONE]\n\n")
        assert await here.task == 0
    assert engine.closed == []


@pytest.mark.anyio
@pytest.mark.parametrize("options", [{"drain_s": 1}, {}])
async def test_the_time_limit_or_a_second_signal_ends_what_still_runs(engine: Any, options: dict[str, Any]) -> None:
    engine.gate = asyncio.Event()
    async with running(engine, **options) as here, httpx.AsyncClient(timeout=None) as client:
        await here.is_ready()
        request = asyncio.create_task(client.post(f"{here.url}/v1/completions", json={"prompt": "a"}))
        while not engine.calls:
            await asyncio.sleep(0.01)
        interrupt(signal.SIGTERM)
        if not options:
            await here.refuses_connections()
            interrupt(signal.SIGTERM)
        assert await here.task == 0
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
    assert engine.was_shut_down


@pytest.mark.anyio
async def test_a_signal_ends_the_start(engine: Any) -> None:
    engine.start_gate = asyncio.Event()
    async with running(engine) as here:
        await asyncio.sleep(0.05)
        interrupt(signal.SIGINT)
        assert await here.task == 130
    assert engine.was_shut_down


@pytest.mark.anyio
async def test_nobody_is_let_in_before_the_engine_is_ready(engine: Any) -> None:
    engine.start_gate = asyncio.Event()
    async with running(engine) as here:
        await here.refuses_connections()
        engine.start_gate.set()
        await here.is_ready()
        interrupt(signal.SIGTERM)
        await here.task


@pytest.mark.anyio
async def test_an_engine_that_fails_to_start_is_shut_down_and_raises(engine: Any, engine_dead: Any) -> None:
    engine.starts_with = engine_dead
    async with running(engine) as here:
        with pytest.raises(type(engine_dead)):
            await here.task
    assert engine.was_shut_down


@pytest.mark.anyio
async def test_the_server_ends_with_an_engine_that_gives_up(engine: Any, engine_dead: Any) -> None:
    async with running(engine) as here:
        await here.is_ready()
        engine.error = engine_dead
        with pytest.raises(type(engine_dead)):
            await here.task


@pytest.mark.anyio
async def test_a_client_that_closes_its_connection_aborts_its_request(engine: Any) -> None:
    engine.gate = asyncio.Event()
    async with running(engine) as here:
        await here.is_ready()
        async with httpx.AsyncClient(timeout=None) as client:
            request = asyncio.create_task(client.post(f"{here.url}/v1/completions", json={"prompt": "a"}))
            while not engine.calls:
                await asyncio.sleep(0.01)
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)
        while not engine.closed:
            await asyncio.sleep(0.01)
        interrupt(signal.SIGTERM)
        await here.task
