"""The thread between the engine's messages and the event loop: what readers see is whole, in order, and once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import zmq

from vllm_core.engine import wire
from vllm_core.engine.messages import EngineRequest, RequestUpdate, TokenLogprobs
from vllm_core.engine.postprocess import Postprocessor
from vllm_core.engine.preprocess import Prepared, child_id
from vllm_core.output_thread import Batch, OutputThread, Waiter
from vllm_core.sampling_params import SamplingParams

pytestmark = pytest.mark.anyio


class Owner:
    """Does in the event loop what `AsyncLLM` does."""

    def __init__(self, address: str) -> None:
        self.context = zmq.Context()
        self.batches: list[Batch] = []
        self.errors: list[Exception] = []
        self.waiters: dict[str, Waiter] = {}
        self.thread = OutputThread(self.context, address, self.take, self.errors.append)
        self.thread.begin(Postprocessor(None))
        self.engine = self.context.socket(zmq.PUSH)
        self.engine.connect(address)

    def take(self, batch: Batch) -> None:
        self.batches.append(batch)
        for news in batch.news:
            self.waiters[news.request_id].take(news)

    def add(self, name: str, **params: Any) -> Waiter:
        wanted = SamplingParams(**params)
        children = [
            EngineRequest(request_id=child_id(name, i), prompt_token_ids=[1], arrival_time=0.0) for i in range(wanted.n)
        ]
        prepared = Prepared(name, None, [1], wanted, children)
        self.waiters[name] = Waiter(prepared)
        self.thread.add(prepared)
        return self.waiters[name]

    def send(self, *updates: RequestUpdate) -> None:
        self.engine.send_multipart((wire.UPDATES, wire.encode(list(updates))))

    async def until(self, condition: Any) -> None:
        while not condition():
            await asyncio.sleep(0.001)


@pytest.fixture
async def owner(tmp_path: Any) -> Any:
    owner = Owner(f"ipc://{tmp_path}/out")
    yield owner
    owner.thread.stop()
    owner.context.destroy(linger=0)


def update(name: str, index: int, *tokens: int, **more: Any) -> RequestUpdate:
    return RequestUpdate(request_id=child_id(name, index), token_ids=list(tokens), **more)


async def test_tokens_of_all_sequences_arrive_in_order_and_once(owner: Owner) -> None:
    waiter = owner.add("r", n=2)
    for token in range(50):
        owner.send(update("r", 0, token), update("r", 1, token + 100))
    owner.send(update("r", 0, 50, finish_reason="stop", stop_reason=50))
    owner.send(update("r", 1, finish_reason="abort"))
    await owner.until(lambda: waiter.finished)
    first, second = waiter.output.outputs  # type: ignore[union-attr]
    assert first.token_ids == list(range(51))
    assert second.token_ids == list(range(100, 150))
    assert [(one.finish_reason, one.stop_reason) for one in (first, second)] == [("stop", None), ("abort", None)]
    assert waiter.output.metrics["time_to_first_token_s"] > 0  # type: ignore[union-attr]


async def test_logprobs_belong_to_their_tokens(owner: Owner) -> None:
    waiter = owner.add("r", logprobs=1)
    for token in range(5):
        owner.send(update("r", 0, token, logprobs=[TokenLogprobs(token, -float(token), 1, [token], [-float(token)])]))
    owner.send(update("r", 0, 9, logprobs=[TokenLogprobs(9, -9.0, 1, [9], [-9.0])], finish_reason="length"))
    await owner.until(lambda: waiter.finished)
    (out,) = waiter.output.outputs  # type: ignore[union-attr]
    assert [next(iter(entry)) for entry in out.logprobs] == out.token_ids == [0, 1, 2, 3, 4, 9]
    assert out.cumulative_logprob == -19.0


async def test_a_reader_that_looks_between_steps_sees_whole_steps(owner: Owner) -> None:
    waiter = owner.add("r", logprobs=0)
    for token in range(200):
        owner.send(update("r", 0, token, logprobs=[TokenLogprobs(token, -1.0, 1, [], [])]))
    owner.send(update("r", 0, 200, logprobs=[TokenLogprobs(200, -1.0, 1, [], [])], finish_reason="length"))
    looks = 0
    while not waiter.finished:
        await waiter.next()
        (out,) = waiter.output.outputs  # type: ignore[union-attr]
        assert len(out.token_ids) == len(out.logprobs)
        looks += 1
    assert 1 <= looks <= 201


async def test_a_dropped_request_is_followed_no_longer_and_disturbs_no_other(owner: Owner) -> None:
    gone, stays = owner.add("gone"), owner.add("stays")
    owner.thread.drop("gone")
    owner.send(update("gone", 0, 1), update("stays", 0, 2, finish_reason="length"))
    await owner.until(lambda: stays.finished)
    assert not gone.event.is_set()
    assert [news.request_id for batch in owner.batches for news in batch.news] == ["stays"]


async def test_other_messages_pass_as_they_came(owner: Owner) -> None:
    owner.engine.send_multipart((wire.STATS_REPLY, b"payload"))
    await owner.until(lambda: owner.batches)
    assert owner.batches[0].messages == [(wire.STATS_REPLY, b"payload")]


async def test_bytes_that_are_no_message_are_an_error_and_the_thread_can_still_be_stopped(owner: Owner) -> None:
    owner.engine.send_multipart((wire.UPDATES, b"no such form"))
    await owner.until(lambda: owner.errors)
    assert owner.batches == []
