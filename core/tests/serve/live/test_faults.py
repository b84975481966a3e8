"""Processes that die or hang under load, and a server that is told to stop: every request is answered or fails cleanly."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import httpx
import pytest

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]


async def status(server: Any, path: str) -> int:
    async with httpx.AsyncClient(base_url=server.url, timeout=60, trust_env=False) as client:
        return (await client.get(path)).status_code


async def load(streams: Any, stop: asyncio.Event) -> None:
    while not stop.is_set():
        outcome = await streams.stream(1000, n=4)
        if outcome.status != 200:
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("victim", "number"),
    [
        ("engine", signal.SIGKILL),
        pytest.param("worker", signal.SIGKILL, marks=pytest.mark.slow),
        # Half a minute passes before a process that says nothing is taken to hang.
        pytest.param("engine", signal.SIGSTOP, marks=pytest.mark.slow),
        pytest.param("worker", signal.SIGSTOP, marks=pytest.mark.slow),
    ],
)
async def test_a_process_that_dies_or_hangs_under_load_comes_back(
    start: Any, streams_on: Any, settled: Any, children_of: Any, victim: str, number: signal.Signals
) -> None:
    options = () if victim == "engine" else ("--tensor-parallel-size", "2")
    with start(*options) as server:
        streams, stop = streams_on(server), asyncio.Event()
        clients = [asyncio.create_task(load(streams, stop)) for _ in range(20)]
        await settled(lambda: server.metrics()["vllm:num_requests_running"] > 20)
        pid = server.engine_pid if victim == "engine" else children_of(server.engine_pid, "worker_main")[-1]
        os.kill(pid, number)
        while await status(server, "/health/ready") != 503:
            await asyncio.sleep(0.02)
        assert await status(server, "/health/live") == 200, "the process need not be replaced"
        assert await status(server, "/health") == 503
        while await status(server, "/health/ready") != 200:
            await asyncio.sleep(0.1)
        before = sum(one.ended for one in streams.outcomes)
        stop.set()
        await asyncio.gather(*clients)
        assert (await streams.stream(10)).ended
        assert sum(one.ended for one in streams.outcomes) > before
        assert [one for one in streams.outcomes if not one.is_clean] == []
        assert any(one.status == 503 for one in streams.outcomes), "told at once while it was away"
        assert any(one.status == 200 and "service_unavailable" in one.error for one in streams.outcomes)
        await settled(server.is_idle)
        assert server.metrics()["vllm:engine_restarts_total"] == 1


async def test_the_first_signal_lets_requests_finish(start: Any, streams_on: Any, settled: Any) -> None:
    with start() as server:
        streams = streams_on(server)
        running = [asyncio.create_task(streams.stream(500, n=10)) for _ in range(10)]
        await settled(lambda: server.metrics()["vllm:generation_tokens_total"] > 0)
        server.process.send_signal(signal.SIGTERM)
        outcomes = await asyncio.gather(*running)
        assert all(one.ended for one in outcomes if one.status == 200)
        assert any(one.ended for one in outcomes)
        assert await asyncio.to_thread(server.process.wait, 60) == 0


async def test_the_second_signal_does_not_wait(start: Any, streams_on: Any, settled: Any) -> None:
    with start() as server:
        streams = streams_on(server)
        running = [asyncio.create_task(streams.stream(2000, n=64)) for _ in range(8)]
        await settled(lambda: server.metrics()["vllm:generation_tokens_total"] > 0)
        server.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.2)
        server.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(server.process.wait, 60) == 0
        outcomes = await asyncio.gather(*running)
        assert not all(one.ended for one in outcomes), "some were still running"
        assert "Traceback" not in "".join(server.log)
