"""`AsyncLLM`: an engine in its own process, for servers.

Tokenizing and detokenizing happen here; the engine process sees token ids alone. A process that dies fails its requests
with EngineDeadError and is started again, with a provider that failed denied; more than `MAX_RESTARTS` within
`RESTART_WINDOW_S` end the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import msgspec
import zmq
import zmq.asyncio

from vllm_core.engine import wire
from vllm_core.engine.messages import EngineStats, RequestUpdate
from vllm_core.engine.postprocess import Postprocessor
from vllm_core.engine.preprocess import Prepared, Preprocessor
from vllm_core.errors import EngineDeadError, RequestError, VLLMCoreError
from vllm_core.outputs import EmbeddingRequestOutput, RequestOutput
from vllm_core.sampling_params import PoolingParams, SamplingParams

if TYPE_CHECKING:
    from vllm_core.launch import Blueprint
    from vllm_core.loader.tokenizer import Tokenizer

log = logging.getLogger("vllm_core")

MAX_RESTARTS = 3
RESTART_WINDOW_S = 600.0

_updates = msgspec.msgpack.Decoder(list[RequestUpdate]).decode
_failure = msgspec.msgpack.Decoder(wire.Failure).decode
_ready = msgspec.msgpack.Decoder(wire.Ready).decode
_stats = msgspec.msgpack.Decoder(EngineStats).decode


class _Waiter:
    """The newest output of one request. Outputs are cumulative, so a slow reader skips, and nothing piles up."""

    __slots__ = ("error", "event", "output")

    def __init__(self) -> None:
        self.event = asyncio.Event()
        self.output: RequestOutput | EmbeddingRequestOutput | None = None
        self.error: Exception | None = None

    async def next(self) -> RequestOutput | EmbeddingRequestOutput:
        await self.event.wait()
        self.event.clear()
        if self.error is not None:
            raise self.error
        assert self.output is not None, "woken without an output"
        return self.output


class AsyncLLM:
    """An engine in its own process. All methods belong to one event loop."""

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._design: Blueprint | None = None
        self._post: Postprocessor | None = None
        self._pre: Preprocessor | None = None
        self._waiters: dict[str, _Waiter] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._replies: dict[bytes, list[asyncio.Future[bytes]]] = {wire.STATS_REPLY: [], wire.RESET_REPLY: []}
        self._ready: asyncio.Future[wire.Ready] | None = None
        self._failure: wire.Failure | None = None
        self._restarts: list[float] = []
        self._stopping = False
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
        self._context = zmq.asyncio.Context()
        self._outbox, self._inbox = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        self._outbox.bind(f"ipc://{self._folder}/in")
        self._inbox.bind(f"ipc://{self._folder}/out")
        self._tasks.append(asyncio.create_task(self._read()))
        launch_task = asyncio.create_task(self._launch())
        try:
            # The tokenizer is read here while the engine process loads the weights.
            _, self.tokenizer = await asyncio.gather(launch_task, asyncio.to_thread(load_tokenizer, self._design))
        except BaseException:
            launch_task.cancel()  # gather does not, and a process started after the shutdown would stay
            self.shutdown()
            raise
        self._post = Postprocessor(self.tokenizer)
        self._check_against_limits()
        self._tasks.append(asyncio.create_task(self._watch()))

    def _check_against_limits(self) -> None:
        """Requests are checked here; what the engine holds is known once it runs, and may be less after a restart."""
        from vllm_core.llm import limits_of

        self._pre = Preprocessor(limits_of(self._blueprint, self.max_model_len), self.tokenizer)

    async def _launch(self) -> None:
        """Start the engine process and wait for its first word."""
        from vllm_core import launch
        from vllm_core.engine_main import Start
        from vllm_core.registry import explain

        self._failure = None
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
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if not self._ready.done():
            await asyncio.sleep(0.2)  # its last message may still be on the way
        if not self._ready.done():
            raise self._death()
        exited.cancel()
        ready = self._ready.result()
        self.max_model_len = ready.max_model_len
        self._design = replace(self._blueprint, plan=explain.from_json(ready.plan))

    def shutdown(self) -> None:
        """Stop the engine process; requests that still run fail."""
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
        if self._design is not None and hasattr(self, "_context"):
            self._context.destroy(linger=0)
            shutil.rmtree(self._folder, ignore_errors=True)
        self._fail_all(self.error or self._death())

    # -- facts

    @property
    def _blueprint(self) -> Blueprint:
        assert self._design is not None, "start() was not awaited"
        return self._design

    @property
    def config(self) -> Any:
        """The engine's configuration."""
        return self._blueprint.config

    @property
    def runner(self) -> str:
        """``generate`` or ``pooling``."""
        return self._blueprint.runner

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """The model's own sampling defaults."""
        return self._blueprint.source.generation_config

    @property
    def model_names(self) -> list[str]:
        """Names that the model answers to."""
        config = self._blueprint.config.model
        return list(config.served_model_name) or [config.model]

    @property
    def plan_text(self) -> str:
        """The Plan for a person."""
        from vllm_core.registry import explain

        return explain.to_text(self._blueprint.plan)

    @property
    def platform_info(self) -> dict[str, str]:
        """Labels of the metric ``vllm:platform_info``."""
        plan = self._blueprint.plan
        return {
            "platform": plan.platform,
            "distribution": f"{plan.distribution} {plan.distribution_version}",
            "device": plan.device.name,
            "architecture": plan.device.architecture,
            "dtype": plan.dtype,
            "kv_dtype": plan.kv_dtype,
            "track": plan.track,
        }

    @property
    def is_alive(self) -> bool:
        """Whether requests can be served now."""
        return self.error is None and self._ready is not None and self._ready.done() and self._process_runs

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
    ) -> AsyncIterator[RequestOutput]:
        """Yield the request's output, cumulative, whenever tokens arrive; closing the generator aborts the request.

        Raises RequestError for a wrong request, EngineDeadError when the engine process goes.
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
        waiter = await self._submit(prepared)
        try:
            while True:
                output = cast("RequestOutput", await waiter.next())
                finished = output.finished
                yield output
                if finished:
                    return
        finally:
            await self.abort(request_id)

    async def embed(self, prompt: str | Sequence[int], params: PoolingParams, request_id: str) -> EmbeddingRequestOutput:
        """Return the prompt's vector. Raises as `generate`."""
        self._require("pooling")
        assert self._pre is not None, "start() was not awaited"
        prepared = await asyncio.to_thread(self._pre.pool, request_id, prompt, params, arrival_time=time.time())
        waiter = await self._submit(prepared)
        try:
            return cast("EmbeddingRequestOutput", await waiter.next())
        finally:
            await self.abort(request_id)

    async def abort(self, request_id: str) -> None:
        """End a request; one that has finished, or never was, is no error."""
        self._waiters.pop(request_id, None)
        left = self._post.drop(request_id) if self._post is not None else []
        if left and self._process_runs:
            await self._send(wire.ABORT, left)

    async def stats(self) -> EngineStats:
        """Counters since start and gauges now. Raises EngineDeadError."""
        return _stats(await self._ask(wire.STATS, wire.STATS_REPLY))

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; False while some are in use."""
        return cast("bool", msgspec.msgpack.decode(await self._ask(wire.RESET, wire.RESET_REPLY)))

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

    async def _submit(self, prepared: Prepared) -> _Waiter:
        assert self._post is not None, "start() was not awaited"
        if not self.is_alive:  # it may have gone while the prompt was prepared
            raise self.error or self._death()
        if prepared.request_id in self._waiters:
            raise RequestError(
                "Request id is in use",
                on=prepared.request_id,
                found="a running request",
                expected="a fresh id",
                fix="send another id",
            )
        waiter = self._waiters[prepared.request_id] = _Waiter()
        self._post.add(prepared)
        for child in prepared.children:
            await self._send(wire.ADD, child)
        return waiter

    async def _send(self, kind: bytes, payload: object) -> None:
        await self._outbox.send_multipart((kind, wire.encode(payload)))

    async def _ask(self, question: bytes, reply: bytes) -> bytes:
        if not self.is_alive:
            raise self.error or self._death()
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._replies[reply].append(future)
        await self._send(question, None)
        return await future

    # -- the engine process

    async def _read(self) -> None:
        """Dispatch the engine process's messages. Without it nothing is answered, so its failure ends the engine."""
        try:
            while True:
                await self._dispatch(*await self._inbox.recv_multipart())
        except Exception as error:
            log.exception("reading the engine's messages failed")
            self.error = wire.Failure.of(error).to_error()
            self._fail_all(self.error)

    async def _dispatch(self, kind: bytes, payload: bytes) -> None:
        if kind == wire.UPDATES:
            await self._deliver(_updates(payload))
        elif kind == wire.READY:
            if self._ready is not None and not self._ready.done():
                self._ready.set_result(_ready(payload))
        elif kind == wire.FAILED:
            self._failure = _failure(payload)
        elif kind == wire.REFUSED:
            refused = _failure(payload)
            self._fail(refused.request_id.rpartition("#")[0], refused.to_error())
        elif self._replies[kind]:
            future = self._replies[kind].pop(0)
            if not future.done():
                future.set_result(payload)

    async def _deliver(self, updates: list[RequestUpdate]) -> None:
        assert self._post is not None, "updates before the engine was ready"
        processed = self._post.process(updates)
        if processed.abort:
            await self._send(wire.ABORT, processed.abort)
        for output in processed.outputs:
            waiter = self._waiters.get(output.request_id)
            if waiter is not None:
                waiter.output = output
                waiter.event.set()

    async def _watch(self) -> None:
        """Wait for the process to end; fail its requests and start it again."""
        while not self._stopping:
            assert self._process is not None, "watching before the launch"
            await self._process.wait()
            await asyncio.sleep(0.2)  # its last message may still be on the way
            error = self._death()
            log.error("%s", error)
            self._fail_all(error)
            now = time.monotonic()
            self._restarts = [at for at in self._restarts if now - at < RESTART_WINDOW_S] + [now]
            if len(self._restarts) > MAX_RESTARTS:
                self.error = error
                return
            try:
                self._deny_culprit()
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
        status = self._process.returncode if self._process is not None else None
        ended = "it is starting" if status is None else f"exit status {status}"
        found = ended if self._failure is None else f"{self._failure.what}: {self._failure.found}"
        return EngineDeadError(
            "Engine process is gone",
            on="engine process" if self._failure is None else self._failure.on,
            found="shut down" if self._stopping else found,
            expected="a running engine",
            fix="see the log; send the request again once /health answers 200",
        )

    def _fail(self, request_id: str, error: Exception) -> None:
        waiter = self._waiters.get(request_id)
        if waiter is not None:
            waiter.error = error
            waiter.event.set()

    def _fail_all(self, error: Exception) -> None:
        for request_id in list(self._waiters):
            self._fail(request_id, error)
            if self._post is not None:
                self._post.drop(request_id)
        for futures in self._replies.values():
            for future in futures:
                if not future.done():
                    future.set_exception(error)
            futures.clear()
