"""TLS, Unix sockets, the list of running servers."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from vllm_core.errors import ConfigError
from vllm_core.serve import registered, server
from vllm_core.serve.settings import ServerOptions

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VLLM_CORE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@asynccontextmanager
async def serving(engine: Any, options: ServerOptions) -> AsyncIterator[registered.Entry]:
    with server._bind(options) as sock:
        task = asyncio.create_task(server.serve(options, engine, sock))
        while not registered.entries() and not task.done():
            await asyncio.sleep(0.01)
        try:
            yield registered.entries()[0]
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            assert await task == 0


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("tls")
    key, cert = str(folder / "key.pem"), str(folder / "cert.pem")
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert, "-days", "2"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*make, *names], check=True, capture_output=True, timeout=60)
    return key, cert


async def test_tls_serves_clients_that_trust_the_certificate(engine: Any, certificate: tuple[str, str]) -> None:
    key, cert = certificate
    async with serving(engine, ServerOptions(port=0, ssl_keyfile=key, ssl_certfile=cert)) as one:
        assert one.address.startswith("https://127.0.0.1:")
        trust = ssl.create_default_context(cafile=cert)
        async with httpx.AsyncClient(verify=trust, trust_env=False) as client:
            assert (await client.get(f"{one.address}/health")).status_code == 200
        async with httpx.AsyncClient(trust_env=False) as client:
            with pytest.raises(httpx.ConnectError):
                await client.get(f"{one.address}/health")


async def test_clients_without_a_certificate_are_turned_away_where_one_is_required(
    engine: Any, certificate: tuple[str, str]
) -> None:
    key, cert = certificate
    required = ServerOptions(port=0, ssl_keyfile=key, ssl_certfile=cert, ssl_ca_certs=cert, ssl_cert_reqs=2)
    async with serving(engine, required) as one:
        trust = ssl.create_default_context(cafile=cert)
        async with httpx.AsyncClient(verify=trust, trust_env=False) as client:
            with pytest.raises(httpx.TransportError):
                await client.get(f"{one.address}/health")
        trust.load_cert_chain(cert, key)
        async with httpx.AsyncClient(verify=trust, trust_env=False) as client:
            assert (await client.get(f"{one.address}/health")).status_code == 200


def test_ciphers_that_do_not_exist_are_refused(certificate: tuple[str, str]) -> None:
    key, cert = certificate
    with pytest.raises(ConfigError, match="TLS cannot be set up"):
        server._check_tls(ServerOptions(ssl_keyfile=key, ssl_certfile=cert, ssl_ciphers="no-such-cipher"))


async def test_a_unix_socket_serves_too(engine: Any, tmp_path: Path) -> None:
    from vllm_core.client import Server

    path = str(tmp_path / "s")
    async with serving(engine, ServerOptions(uds=path)) as one:
        assert one.address == f"unix:{path}"
        here = Server(one.address)
        assert await asyncio.to_thread(here.state) == "ready"
        assert await asyncio.to_thread(here.models) == ["fake", "alias"]
        assert "vllm:num_requests_running" in await asyncio.to_thread(here.metrics)
        here.close()


async def test_a_server_is_listed_while_it_runs(engine: Any, cache: Path) -> None:
    async with serving(engine, ServerOptions(port=0)) as one:
        assert (one.pid, one.models) == (os.getpid(), ["fake", "alias"])
    assert registered.entries() == []
    assert list((cache / "servers").iterdir()) == []


async def test_what_a_killed_server_left_is_not_listed(cache: Path) -> None:
    with registered.entry("http://127.0.0.1:1", ["m"], {}):
        (file,) = (cache / "servers").iterdir()
        left = file.read_bytes()
        assert len(registered.entries()) == 1
    file.write_bytes(left.replace(f'"pid":{os.getpid()}'.encode(), b'"pid":1'))
    (cache / "servers" / "other.json").write_text("{")
    assert registered.entries() == []
    assert not file.exists()
