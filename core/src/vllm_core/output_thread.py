"""From the engine process's messages to text, in a thread of its own, so that the event loop is left to HTTP.

The thread owns the outputs that the postprocessor mutates; the event loop owns those that readers see. What crosses between
them is what is new of each sequence, in order, so that no reader sees half of a step.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq

from vllm_core.engine import wire
from vllm_core.engine.messages import RequestUpdate
from vllm_core.engine.postprocess import Postprocessor
from vllm_core.engine.preprocess import Prepared
from vllm_core.outputs import CompletionOutput, EmbeddingRequestOutput, Logprob, RequestOutput

log = logging.getLogger("vllm_core")

_updates = msgspec.msgpack.Decoder(list[RequestUpdate]).decode

_ENDED = -1
MAX_MESSAGES = 64
"""Messages handed over at once: those that are there, without waiting for more."""


class SequenceNews(msgspec.Struct, gc=False):
    """What is new of one sequence: its whole text, the tokens and log-probabilities that were added, its end."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def apply(self, out: CompletionOutput) -> None:
        """Bring a reader's copy up to date."""
        out.text = self.text
        out.token_ids += self.token_ids
        if self.logprobs is not None:
            if out.logprobs is None:
                out.logprobs = []
            out.logprobs += self.logprobs
            out.cumulative_logprob = self.cumulative_logprob
        if self.finish_reason is not None:
            out.finish_reason, out.stop_reason = self.finish_reason, self.stop_reason


class RequestNews(msgspec.Struct, gc=False):
    """What is new of one generation; the other fields come with its first tokens and with its end."""

    request_id: str
    sequences: list[SequenceNews]
    finished: bool = False
    num_cached_tokens: int = 0
    error: str | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: dict[str, float] | None = None

    def apply(self, output: RequestOutput) -> None:
        """Bring a reader's copy up to date."""
        for news in self.sequences:
            news.apply(output.outputs[news.index])
        if self.metrics is not None:
            output.finished, output.error = self.finished, self.error
            output.num_cached_tokens = self.num_cached_tokens
            if self.prompt_logprobs is not None:
                output.prompt_logprobs = self.prompt_logprobs
            output.metrics.update(self.metrics)


@dataclass(slots=True)
class Batch:
    """What the thread hands over: news of requests, children to abort, other messages as they came."""

    news: list[RequestNews | EmbeddingRequestOutput] = field(default_factory=list)
    abort: list[str] = field(default_factory=list)
    messages: list[tuple[bytes, bytes]] = field(default_factory=list)


class Waiter:
    """The newest output of one request. Outputs are cumulative, so a slow reader skips, and nothing piles up."""

    __slots__ = ("children", "error", "event", "finished", "output", "started")

    def __init__(self, prepared: Prepared) -> None:
        self.children = [child.request_id for child in prepared.children]
        self.event = asyncio.Event()
        self.started = time.monotonic()
        self.finished = False
        self.error: Exception | None = None
        self.output: RequestOutput | EmbeddingRequestOutput = RequestOutput(
            request_id=prepared.request_id,
            prompt=prepared.prompt,
            prompt_token_ids=prepared.prompt_token_ids,
            outputs=[CompletionOutput(index=index, text="", token_ids=[]) for index in range(len(prepared.children))],
            finished=False,
        )

    async def next(self) -> RequestOutput | EmbeddingRequestOutput:
        await self.event.wait()
        self.event.clear()
        if self.error is not None:
            raise self.error
        return self.output

    def take(self, news: RequestNews | EmbeddingRequestOutput) -> None:
        """Bring the output up to date and wake its reader."""
        if isinstance(news, EmbeddingRequestOutput):
            self.output = news
        else:
            assert isinstance(self.output, RequestOutput), "a request generates or pools"
            news.apply(self.output)
            if news.metrics is not None and "time_to_first_token_s" not in self.output.metrics:
                self.output.metrics["time_to_first_token_s"] = time.monotonic() - self.started
        self.finished = news.finished
        self.event.set()


class OutputThread:
    """Reads a PULL socket until it is stopped. `take` and `failed` are called in the event loop."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        take: Callable[[Batch], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._take, self._failed = take, failed
        self._commands: deque[tuple[str, Any]] = deque()
        self._post: Postprocessor | None = None
        self._sent: dict[str, list[int]] = {}
        """By request, the tokens of each sequence that were handed over."""
        self._inbox = context.socket(zmq.PULL)
        self._inbox.set_hwm(wire.MAX_UNREAD)
        self._inbox.bind(address)
        self._control, control = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        self._control.bind(f"inproc://{id(self)}")
        control.connect(f"inproc://{id(self)}")
        self._thread = threading.Thread(target=self._run, args=(control,), name="vllm-core-output", daemon=True)
        self._thread.start()

    def begin(self, post: Postprocessor) -> None:
        """Text can be made from now on; before, the engine has no requests."""
        self._post = post

    def add(self, prepared: Prepared) -> None:
        """Follow a request; called before the engine is told of it."""
        self._commands.append(("add", prepared))

    def drop(self, request_id: str) -> None:
        """Follow it no longer."""
        self._commands.append(("drop", request_id))

    def stop(self) -> None:
        """End the thread and close its sockets; returns when it has ended."""
        if self._thread.is_alive():
            self._control.send(b"")
            self._thread.join()
        self._control.close(linger=0)

    def _run(self, control: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(self._inbox, zmq.POLLIN)
        poller.register(control, zmq.POLLIN)
        try:
            while control not in dict(poller.poll()):
                batch = Batch()
                for kind, payload in self._receive():
                    if kind == wire.UPDATES:
                        self._process(payload, batch)
                    else:
                        batch.messages.append((kind, payload))
                self._hand_over(self._take, batch)
        except Exception as error:  # without this thread nothing is answered: the owner ends the engine
            log.exception("reading the engine's messages failed")
            self._hand_over(self._failed, error)
            control.poll()  # stay for `stop`
        finally:
            self._inbox.close(linger=0)
            control.close(linger=0)

    def _hand_over(self, function: Callable[[Any], None], value: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, value)

    def _receive(self) -> list[tuple[bytes, bytes]]:
        found: list[tuple[bytes, bytes]] = []
        while len(found) < MAX_MESSAGES and self._inbox.poll(0):
            kind, payload = self._inbox.recv_multipart()
            found.append((kind, payload))
        return found

    def _process(self, payload: bytes, batch: Batch) -> None:
        updates, post = _updates(payload), self._post
        assert post is not None, "updates before the engine was ready"
        while self._commands:
            kind, value = self._commands.popleft()
            if kind == "add":
                post.add(value)
                self._sent[value.request_id] = [0] * len(value.children)
            else:
                post.drop(value)
                self._sent.pop(value, None)
        processed = post.process(updates)
        batch.abort += processed.abort
        for output in processed.outputs:
            batch.news.append(output if isinstance(output, EmbeddingRequestOutput) else self._news(output))
            if output.finished:
                self._sent.pop(output.request_id, None)

    def _news(self, output: RequestOutput) -> RequestNews:
        """Once a step for every running request."""
        sent, first = self._sent[output.request_id], False
        sequences = []
        for out in output.outputs:
            at, now, ended = sent[out.index], len(out.token_ids), out.finish_reason is not None
            if at < 0 or (now == at and not ended):
                continue
            first = first or not at
            sent[out.index] = _ENDED if ended else now
            news = SequenceNews(out.index, out.text, out.token_ids[at:])
            if out.logprobs is not None:
                news.logprobs, news.cumulative_logprob = out.logprobs[at:], out.cumulative_logprob
            if ended:
                news.finish_reason, news.stop_reason = out.finish_reason, out.stop_reason
            sequences.append(news)
        if not (first or output.finished or output.error):
            return RequestNews(output.request_id, sequences)
        # The thread hears of a request with its first output: when the first token came is measured by the owner.
        metrics = {name: value for name, value in output.metrics.items() if name != "time_to_first_token_s"}
        return RequestNews(
            output.request_id,
            sequences,
            output.finished,
            output.num_cached_tokens,
            output.error,
            output.prompt_logprobs if first else None,
            metrics,
        )
