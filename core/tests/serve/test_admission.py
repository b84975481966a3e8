"""Who may go to the engine: bounds, order, and shares between keys."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest

from vllm_core.errors import DeadlineError
from vllm_core.serve.admission import Admission
from vllm_core.serve.errors import HTTPRequestError

pytestmark = pytest.mark.anyio


class Clients:
    """Requests that hold their place until they are told to end."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.order: list[str] = []

    async def _hold(self, name: str, tenant: str, count: int, done: asyncio.Event, options: Any) -> None:
        async with self.admission.enter(tenant, count, **options):
            self.order.append(name)
            await done.wait()
            self.admission.charge(tenant, prompt_tokens=10)

    async def send(self, name: str, tenant: str, count: int = 1, **options: Any) -> tuple[asyncio.Task[None], asyncio.Event]:
        done = asyncio.Event()
        task = asyncio.create_task(self._hold(name, tenant, count, done, options))
        await asyncio.sleep(0)
        return task, done


async def test_beyond_the_bound_requests_are_refused_with_a_time_to_come_back() -> None:
    admission = Admission(2, 1)
    async with AsyncExitStack() as held:
        for _ in range(3):
            await held.enter_async_context(admission.enter("0", 1))
        with pytest.raises(HTTPRequestError) as caught:
            await held.enter_async_context(admission.enter("0", 1))
        assert (caught.value.status, admission.refused) == (429, 1)
        assert int(caught.value.headers["retry-after"]) >= 1
    async with admission.enter("0", 3):
        assert admission.running == 3


async def test_a_request_of_more_sequences_than_fit_is_refused_whole() -> None:
    admission = Admission(2, 1)
    with pytest.raises(HTTPRequestError):
        async with admission.enter("0", 4):
            pass
    assert admission.running == 0


async def test_without_a_bound_nobody_is_refused() -> None:
    async with Admission(1, None).enter("0", 10_000):
        pass


async def test_the_key_that_was_served_least_goes_first() -> None:
    clients = Clients(Admission(1, None, fair=True))
    sent = {name: await clients.send(name, name[0]) for name in ("a0", "a1", "a2", "b0", "b1", "b2")}
    for _ in sent:
        task, done = sent[clients.order[-1]]
        done.set()
        await task
        await asyncio.sleep(0)
    assert clients.order == ["a0", "b0", "a1", "b1", "a2", "b2"], "not the order of arrival"
    assert clients.admission.running == clients.admission.waiting == 0


async def test_idle_time_earns_no_credit() -> None:
    admission = Admission(1, None, fair=True)
    async with admission.enter("busy", 1):
        admission.charge("busy", prompt_tokens=1000)
        clients = Clients(admission)
        task, done = await clients.send("late", "late")
        assert admission._tenants["late"].served == 1000
        done.set()
    await task


async def test_priorities_order_the_requests_of_one_key() -> None:
    admission = Admission(1, None, fair=True)
    clients = Clients(admission)
    async with admission.enter("a", 1):
        sent = [await clients.send(name, "a", priority=priority) for name, priority in (("low", 5), ("high", -5), ("mid", 0))]
        for _, done in sent:
            done.set()
    for task, _ in sent:
        await task
    assert clients.order == ["high", "mid", "low"]


async def test_a_waiting_request_that_is_cancelled_leaves_nothing_behind() -> None:
    admission = Admission(1, None, fair=True)
    clients = Clients(admission)
    async with admission.enter("a", 1):
        task, _ = await clients.send("gone", "b")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert admission.waiting == 0
    async with admission.enter("a", 1):
        assert admission.running == 1
    assert clients.order == []


async def test_one_that_is_cancelled_in_the_moment_it_is_let_in_gives_its_place_back() -> None:
    admission = Admission(1, None, fair=True)
    clients = Clients(admission)
    async with admission.enter("a", 1):
        task, _ = await clients.send("gone", "b")
    task.cancel()  # its place was given when the other one ended, and its task has not run since
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (admission.running, admission.waiting, clients.order) == (0, 0, [])


async def test_a_deadline_ends_the_waiting() -> None:
    admission = Admission(1, None, fair=True)
    async with admission.enter("a", 1):
        with pytest.raises(DeadlineError):
            async with admission.enter("b", 1, deadline=asyncio.get_running_loop().time() + 0.01):
                pass
        assert admission.waiting == 0
    async with admission.enter("b", 1):
        pass
    assert admission.running == 0


async def test_a_request_larger_than_the_engine_goes_when_nothing_else_runs() -> None:
    admission = Admission(2, None, fair=True)
    clients = Clients(admission)
    async with admission.enter("a", 1):
        task, done = await clients.send("large", "b", 5)
        assert clients.order == []
    done.set()
    await task
    assert clients.order == ["large"]
