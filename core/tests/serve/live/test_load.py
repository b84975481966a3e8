"""A server under load: nothing leaks, nobody waits for ever, nobody waits for a slow reader."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.anyio
SETTLE_MIB = 48
"""Growth that pools and caches of a fresh process may still have."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seconds", [60, pytest.param(300, marks=pytest.mark.slow)])
async def test_200_streams_with_clients_that_leave_leak_no_block_and_no_memory(
    served: Any, streams: Any, settled: Any, seconds: int
) -> None:
    draw, ends = random.Random(seconds), time.monotonic() + seconds
    before = served.metrics()

    async def client() -> None:
        while time.monotonic() < ends:
            leave = draw.randint(1, 30) if draw.random() < 0.3 else None
            await streams.stream(draw.randint(1, 400), leave_after=leave)

    async def memory() -> list[int]:
        found = []
        while time.monotonic() < ends:
            await asyncio.sleep(seconds / 30)
            found.append(await asyncio.to_thread(served.resident_mib))
        return found

    *_, sizes = await asyncio.gather(*(client() for _ in range(200)), memory())
    print(f"{len(streams.outcomes)} requests, {sum(one.left for one in streams.outcomes)} left by their client, MiB {sizes}")
    assert [one for one in streams.outcomes if not one.is_clean] == []
    assert any(one.left for one in streams.outcomes)
    assert any(one.ended for one in streams.outcomes)
    assert {one.status for one in streams.outcomes} == {200}
    await settled(served.is_idle)
    after = served.metrics()
    ended = after["vllm:request_success_total"] - before["vllm:request_success_total"]
    assert ended == len(streams.outcomes), "every request is counted once, however it ended"
    third = len(sizes) // 3
    assert min(sizes[-third:]) - max(sizes[third : 2 * third]) < SETTLE_MIB, f"memory grows: {sizes}"


async def test_a_client_that_leaves_frees_its_blocks_while_others_go_on(served: Any, streams: Any, settled: Any) -> None:
    others = [asyncio.create_task(streams.stream(1500)) for _ in range(4)]
    gone = await asyncio.gather(*(streams.stream(2000, leave_after=1) for _ in range(8)))
    assert all(one.left for one in gone)
    await settled(lambda: served.metrics()["vllm:num_requests_running"] <= 4)
    assert all(one.ended for one in await asyncio.gather(*others))
    await settled(served.is_idle)


async def test_a_reader_that_never_reads_stalls_nobody(served: Any, streams: Any, settled: Any) -> None:
    body = json.dumps({"prompt": [1], "max_tokens": 2000, "ignore_eos": True, "stream": True, "n": 64, "logprobs": 5}).encode()
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        slow.connect(("127.0.0.1", served.port))
        head = b"POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n"
        slow.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        await settled(lambda: served.metrics()["vllm:num_requests_running"] > 0)
        outcomes = await asyncio.gather(*(streams.stream(50) for _ in range(20)))
        assert all(one.ended for one in outcomes)
    await settled(served.is_idle)


async def test_more_than_may_wait_are_told_to_come_back(start: Any, streams_on: Any, settled: Any) -> None:
    with start("--max-num-seqs", "2", "--max-queued-requests", "3") as server:
        streams = streams_on(server)
        outcomes = await asyncio.gather(*(streams.stream(1500) for _ in range(20)))
        served = [one for one in outcomes if one.status == 200]
        refused = [one for one in outcomes if one.status == 429]
        assert len(served) + len(refused) == 20
        assert len(served) >= 5
        assert refused
        assert all(one.ended for one in served)
        assert b"rate_limit_error" in refused[0].body
        await settled(server.is_idle)
        assert server.metrics()["vllm:requests_refused_total"] == len(refused)
        again = await streams.stream(3)
        assert again.ended, "there is room again"


async def test_a_deadline_ends_a_request_and_frees_it(served: Any, settled: Any) -> None:
    async with httpx.AsyncClient(base_url=served.url, timeout=None, trust_env=False) as client:
        body = {"prompt": [1], "max_tokens": 2000, "ignore_eos": True, "n": 100}
        answer = await client.post("/v1/completions", json=body, headers={"x-request-timeout-s": "0.05"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (504, "timeout")
    await settled(served.is_idle)
