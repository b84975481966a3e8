"""`AsyncLLM`: an engine in its own process, for servers.

Tokenizing and detokenizing happen here, in threads beside the event loop; the engine process sees token ids alone. A process
that dies, or hangs (`pulse`), fails its requests with EngineDeadError and is started again, with a provider that failed denied;
more than `MAX_RESTARTS` within `RESTART_WINDOW_S` end the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import msgspec
import zmq

from vllm_core import pulse
from vllm_core.endings import KILLED_S, collecting, gone, stopped
from vllm_core.engine import wire
from vllm_core.engine.messages import EngineStats
from vllm_core.engine.postprocess import Postprocessor
from vllm_core.engine.preprocess import Prepared, Preprocessor
from vllm_core.engine_facts import EngineFacts
from vllm_core.errors import DeadlineError, RequestError, UnsupportedError, VLLMCoreError
from vllm_core.models.labels import check_use, classified
from vllm_core.output_thread import Batch, OutputThread, Waiter
from vllm_core.outputs import ClassificationRequestOutput, EmbeddingRequestOutput, RequestOutput
from vllm_core.sampling_params import PoolingParams, SamplingParams

if TYPE_CHECKING:
    from vllm_core.launch import Blueprint
    from vllm_core.loader.tokenizer import Tokenizer

log = logging.getLogger("vllm_core")

MAX_RESTARTS = 3
RESTART_WINDOW_S = 600.0
START_TIMES = 4
"""How many times as long as the first start a later one may take; `step_timeout_s` is the least."""
CONNECT_S = 5.0
"""How long a message waits for the engine process to take the connection."""

_failure = msgspec.msgpack.Decoder(wire.Failure).decode
_ready = msgspec.msgpack.Decoder(wire.Ready).decode
_stats = msgspec.msgpack.Decoder(EngineStats).decode
_refusal = msgspec.msgpack.Decoder(wire.Failure | None).decode


def _raise_refusal(reply: bytes) -> None:
    refused = _refusal(reply)
    if refused is not None:
        raise refused.to_error()


class AsyncLLM(EngineFacts):
    """An engine in its own process. All methods belong to one event loop.

    ``step_timeout_s`` is how long one step may take before the process is taken to hang; the other options are those of `LLM`.
    """

    def __init__(self, *, step_timeout_s: float = pulse.STEP_TIMEOUT_S, **options: Any) -> None:
        self._options = options
        self._step_timeout_s = step_timeout_s
        self._start_timeout_s: float | None = None
        self._watch = pulse.Watch(step_timeout_s)
        self._design: Blueprint | None = None
        self._output: OutputThread | None = None
        self._pre: Preprocessor | None = None
        self._waiters: dict[str, Waiter] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._watcher: asyncio.Task[None] | None = None
        answers = (wire.STATS_REPLY, wire.RESET_REPLY, wire.SLEEP_REPLY, wire.WAKE_REPLY)
        self._replies: dict[bytes, list[asyncio.Future[bytes]]] = {kind: [] for kind in answers}
        self._asleep = False
        self._ready: asyncio.Future[wire.Ready] | None = None
        self._failure: wire.Failure | None = None
        self._restarts: list[float] = []
        self._num_restarts = 0
        self._stopping = False
        self._collected: asyncio.Task[None] | None = None
        self.error: Exception | None = None
        self.tokenizer: Tokenizer | None = None
        self.max_model_len = 0

    # -- start and stop

    async def start(self) -> None:
        """Plan, start the engine process, and return when it is ready. Raises VLLMCoreError."""
        from vllm_core import launch
        from vllm_core.llm import load_tokenizer

        self._design = await asyncio.to_thread(launch.blueprint, self._options)
        self._folder = tempfile.mkdtemp(prefix="vllm-core-")  # mkdtemp makes it private to this user
        self._context = zmq.Context()
        self._outbox = self._context.socket(zmq.PUSH)
        self._outbox.set_hwm(0)  # a message is sent at once, or there is no engine: nothing here may wait for it
        self._outbox.bind(f"ipc://{self._folder}/in")
        self._output = OutputThread(self._context, f"ipc://{self._folder}/out", self._take, self._reading_failed)
        launch_task = asyncio.create_task(self._launch())
        try:
            # The tokenizer is read here while the engine process loads the weights.
            reading = asyncio.to_thread(load_tokenizer, self._design.config, self._design.source)
            _, self.tokenizer = await asyncio.gather(launch_task, reading)
        except BaseException:
            launch_task.cancel()  # gather does not, and a process started after the shutdown would stay
            self.shutdown()
            raise
        self._output.begin(Postprocessor(self.tokenizer))
        self._check_against_limits()
        self._watcher = asyncio.create_task(self._keep_running())

    def _check_against_limits(self) -> None:
        """Requests are checked here; what the engine holds is known once it runs, and may be less after a restart."""
        from vllm_core.llm import limits_of

        self._pre = Preprocessor(limits_of(self._blueprint, self.max_model_len), self.tokenizer)

    async def _launch(self) -> None:
        """Start the engine process and wait for its first word; a later start that takes much longer than the first hangs."""
        from vllm_core import launch
        from vllm_core.engine_main import Start
        from vllm_core.registry import explain

        self._failure, self._asleep, began = None, False, time.monotonic()
        self._ready = asyncio.get_running_loop().create_future()
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "vllm_core.engine_main", stdin=asyncio.subprocess.PIPE, start_new_session=True
        )
        assert self._process.stdin is not None, "the pipe was asked for"
        start = Start(self._folder, launch.to_bytes(self._blueprint))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has gone already: its exit says more
            self._process.stdin.write(msgspec.json.encode(start) + b"\n")
            await self._process.stdin.drain()
        exited = asyncio.ensure_future(self._process.wait())
        first: list[asyncio.Future[Any]] = [self._ready, exited]
        limit_s = self._start_timeout_s
        done, _ = await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED, timeout=limit_s)
        if not done:
            allowed = f"less than {START_TIMES} times the first start, or than --step-timeout-s"
            self._failure = pulse.hangs(f"a start that has taken {limit_s:.0f} s", allowed)
            await self._kill(exited)
        if not self._ready.done():
            await asyncio.sleep(0.2)  # its last message may still be on the way
        if not self._ready.done():
            raise self._death()
        exited.cancel()
        ready, self._watch = self._ready.result(), pulse.Watch(self._step_timeout_s)
        self._start_timeout_s = limit_s or max(self._step_timeout_s, START_TIMES * (time.monotonic() - began))
        self.max_model_len = ready.max_model_len
        self._design = replace(self._blueprint, plan=explain.from_json(ready.plan))

    def shutdown(self) -> None:
        """Stop the engine process; requests that still run fail."""
        self._stopping = True
        if self._watcher is not None:
            self._watcher.cancel()
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()  # it has nothing to put in order, and one that a signal stopped hears no other
        if self._output is not None:
            self._output.stop()
            self._context.destroy(linger=0)
            shutil.rmtree(self._folder, ignore_errors=True)
        self._fail_all(self.error or self._death())
        self._collected = collecting(self._process)

    # -- state

    @property
    def num_restarts(self) -> int:
        """Times the engine process was started again."""
        return self._num_restarts

    @property
    def is_alive(self) -> bool:
        """Whether requests can be served now."""
        started = self._ready is not None and self._ready.done()
        return self.error is None and not self._stopping and started and self._process_runs

    @property
    def _process_runs(self) -> bool:
        return self._process is not None and self._process.returncode is None

    # -- requests

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str = "",
        add_special_tokens: bool = True,
        deadline: float | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yield the request's output, cumulative, whenever tokens arrive; closing the generator aborts the request.

        Raises RequestError for a wrong request, EngineDeadError when the engine process goes, DeadlineError when the event
        loop's time is past ``deadline``.
        """
        self._require("generate")
        assert self._pre is not None, "start() was not awaited"
        prepared = await asyncio.to_thread(
            self._pre.generate,
            request_id,
            prompt,
            params,
            arrival_time=time.time(),
            priority=priority,
            cache_salt=cache_salt,
            add_special_tokens=add_special_tokens,
        )
        async with self._following(prepared, deadline) as waiter:
            while True:
                output = cast("RequestOutput", await waiter.next())
                finished = output.finished
                yield output
                if finished:
                    return

    async def embed(
        self, prompt: str | Sequence[int], params: PoolingParams, request_id: str, *, deadline: float | None = None
    ) -> EmbeddingRequestOutput:
        """Return the prompt's vector. Raises as `generate`."""
        self._require("pooling")
        check_use(self.labels, wants_classes=False)
        return await self._pool(prompt, params, request_id, deadline)

    async def classify(
        self, prompt: str | Sequence[int], request_id: str, *, deadline: float | None = None
    ) -> ClassificationRequestOutput:
        """Return the probabilities of the model's classes. Raises as `generate`."""
        self._require("pooling")
        found = self.labels
        check_use(found, wants_classes=True)
        assert found is not None, "it has been checked"
        return classified(await self._pool(prompt, PoolingParams(), request_id, deadline), found)

    async def _pool(
        self, prompt: str | Sequence[int], params: PoolingParams, request_id: str, deadline: float | None
    ) -> EmbeddingRequestOutput:
        assert self._pre is not None, "start() was not awaited"
        prepared = await asyncio.to_thread(self._pre.pool, request_id, prompt, params, arrival_time=time.time())
        async with self._following(prepared, deadline) as waiter:
            return cast("EmbeddingRequestOutput", await waiter.next())

    async def abort(self, request_id: str) -> None:
        """End a request; one that has finished, or never was, is no error."""
        waiter = self._waiters.pop(request_id, None)
        if waiter is None:
            return
        if self._output is not None and not waiter.finished:
            self._output.drop(request_id)
            if self.is_alive:
                with contextlib.suppress(zmq.Again):  # nobody is there whom to tell
                    self._push(wire.ABORT, waiter.children)

    async def stats(self) -> EngineStats:
        """Counters since start and gauges now. Raises EngineDeadError."""
        return _stats(await self._ask(wire.STATS, wire.STATS_REPLY))

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; False while some are in use."""
        return cast("bool", msgspec.msgpack.decode(await self._ask(wire.RESET, wire.RESET_REPLY)))

    async def sleep(self, level: int = 1) -> None:
        """Give device memory back while the process stays: weights go to the host, the KV cache is dropped.

        Requests that run are computed again after `wake_up`; new ones wait. Raises UnsupportedError where the platform does
        not claim ``sleep``, or for another ``level``.
        """
        if level != 1:
            raise UnsupportedError(
                "Level of sleep does not exist",
                on="level",
                found=str(level),
                expected="1: weights to the host, KV cache dropped",
                fix="send level 1, or stop the engine to drop the weights",
            )
        _raise_refusal(await self._ask(wire.SLEEP, wire.SLEEP_REPLY))
        self._asleep = True

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Take the memory again, all of it. Raises MemoryBudgetError where somebody else has it."""
        if tags and set(tags) != {"weights", "kv_cache"}:
            raise UnsupportedError(
                "Memory comes back as a whole",
                on="tags",
                found=", ".join(tags),
                expected="weights and kv_cache together",
                fix="leave tags out",
            )
        _raise_refusal(await self._ask(wire.WAKE, wire.WAKE_REPLY))
        self._asleep = False

    async def is_sleeping(self) -> bool:
        """Between `sleep` and `wake_up`."""
        return self._asleep

    def _require(self, runner: str) -> None:
        if not self.is_alive:
            raise self.error or self._death()
        if self.runner != runner:
            raise RequestError(
                "Model is used for something else",
                on="embeddings" if runner == "pooling" else "generation",
                found=f"an engine with runner {self.runner!r}",
                expected=f"runner {runner!r}",
                fix=f"start the server with --runner {runner}",
            )

    @contextlib.asynccontextmanager
    async def _following(self, prepared: Prepared, deadline: float | None) -> AsyncIterator[Waiter]:
        """Submit a request, and end it with the block, however that ends."""
        if not self.is_alive:  # it may have gone while the prompt was prepared
            raise self.error or self._death()
        request_id = prepared.request_id
        if request_id in self._waiters:
            raise RequestError(
                "Request id is in use", on=request_id, found="a running request", expected="a fresh id", fix="send another id"
            )
        assert self._output is not None, "start() was not awaited"
        waiter = self._waiters[request_id] = Waiter(prepared)
        timer = None
        if deadline is not None:
            timer = asyncio.get_running_loop().call_at(deadline, self._fail, request_id, _too_late(request_id))
        try:
            self._output.add(prepared)
            for child in prepared.children:
                await self._send(wire.ADD, child)
            yield waiter
        finally:
            if timer is not None:
                timer.cancel()
            await self.abort(request_id)

    def _push(self, kind: bytes, payload: object) -> None:
        self._outbox.send_multipart((kind, wire.encode(payload)), flags=zmq.NOBLOCK)

    async def _send(self, kind: bytes, payload: object) -> None:
        """Send at once. Raises EngineDeadError where no engine takes it."""
        for _ in range(int(CONNECT_S / 0.01)):
            try:
                return self._push(kind, payload)
            except zmq.Again:  # the process has gone, or has said that it is ready before its connection is up
                if not self.is_alive:
                    break
                await asyncio.sleep(0.01)
        raise self.error or self._death()

    async def _ask(self, question: bytes, reply: bytes) -> bytes:
        if not self.is_alive:
            raise self.error or self._death()
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        await self._send(question, None)
        # Only now: answers are matched by their order, and a question that was not sent has none.
        self._replies[reply].append(future)
        return await future

    # -- the engine process

    def _reading_failed(self, error: Exception) -> None:
        """Without messages nothing is answered, so this ends the engine."""
        self.error = wire.Failure.of(error).to_error()
        self._fail_all(self.error)

    def _take(self, batch: Batch) -> None:
        """Take what the output thread brings; it calls this in the event loop."""
        if self._stopping:
            return
        for kind, payload in batch.messages:
            self._dispatch(kind, payload)
        if batch.abort:
            with contextlib.suppress(zmq.Again):  # the process has gone, and its requests with it
                self._push(wire.ABORT, batch.abort)
        for news in batch.news:
            waiter = self._waiters.get(news.request_id)
            if waiter is not None:
                waiter.take(news)

    def _dispatch(self, kind: bytes, payload: bytes) -> None:
        if kind == wire.READY:
            if self._ready is not None and not self._ready.done():
                self._ready.set_result(_ready(payload))
        elif kind == wire.BEAT:
            self._watch.heard(pulse.decode(payload))
        elif kind == wire.FAILED:
            self._failure = _failure(payload)
        elif kind == wire.REFUSED:
            refused = _failure(payload)
            self._fail(refused.request_id.rpartition("#")[0], refused.to_error())
        elif self._replies[kind]:
            future = self._replies[kind].pop(0)
            if not future.done():
                future.set_result(payload)

    async def _ended(self) -> None:
        """Return when the process has ended, by itself or because it hung, or when it hangs and a kill does not end it."""
        assert self._process is not None, "watching before the launch"
        exited = asyncio.ensure_future(self._process.wait())
        looked = time.monotonic()
        while not exited.done():
            await asyncio.wait({exited}, timeout=pulse.BEAT_S)
            looked, passed = time.monotonic(), time.monotonic() - looked
            hang = None if exited.done() else self._watch.passed(passed)
            if hang is not None:
                self._failure = hang
                await self._kill(exited)
                return

    async def _kill(self, exited: asyncio.Future[int]) -> None:
        """End the process, which has gone or is past help when this returns."""
        assert self._process is not None, "killed before the launch"
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await asyncio.wait({exited}, timeout=KILLED_S)

    async def _keep_running(self) -> None:
        """Wait for the process to end; fail its requests and start it again."""
        while not self._stopping:
            await self._ended()
            await asyncio.sleep(0.2)  # its last message may still be on the way
            error = self._death()
            log.error("%s", error)
            self._fail_all(error)
            if self._process_runs:  # not even a kill ends it while its driver holds it: it still has the device
                self.error = error
                return
            now = time.monotonic()
            self._restarts = [at for at in self._restarts if now - at < RESTART_WINDOW_S] + [now]
            if len(self._restarts) > MAX_RESTARTS:
                self.error = error
                return
            try:
                self._deny_culprit()
                self._num_restarts += 1
                await self._launch()
            except (VLLMCoreError, OSError) as failed:
                self.error = failed
                log.error("engine did not start again: %s", failed)
                self._fail_all(failed)
                return
            self._check_against_limits()

    def _deny_culprit(self) -> None:
        """A provider that failed while serving is not used again; the Plan records it."""
        from vllm_core.registry.demotion import demote

        failure = self._failure
        if failure is not None and failure.op:
            plan = demote(self._blueprint.plan, failure.op, failure.role, failure.found)
            self._design = replace(self._blueprint, plan=plan)

    def _death(self) -> VLLMCoreError:
        """Why the engine process is not there."""
        if self._failure is not None and not (self._ready is not None and self._ready.done()):
            return self._failure.to_error()
        if self._stopping:
            return stopped()
        return gone(self._process.returncode if self._process is not None else None, self._failure)

    def _fail(self, request_id: str, error: Exception) -> None:
        waiter = self._waiters.get(request_id)
        if waiter is not None:
            waiter.error = error
            waiter.event.set()

    def _fail_all(self, error: Exception) -> None:
        for request_id in list(self._waiters):
            self._fail(request_id, error)
        for futures in self._replies.values():
            for future in futures:
                if not future.done():
                    future.set_exception(error)
            futures.clear()


def _too_late(request_id: str) -> DeadlineError:
    return DeadlineError(
        "Request took too long",
        on=request_id,
        found="its deadline, before its end",
        expected="an end within the time that the request or the server allows",
        fix="ask for fewer tokens, allow more time, or try when fewer requests run",
    )
