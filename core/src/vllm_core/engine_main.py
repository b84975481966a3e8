"""The engine process: ``python -m vllm_core.engine_main``, started by `AsyncLLM`.

Reads one line of JSON from standard input (address and blueprint), then serves messages until it is told to stop or its
owner goes away, which closes standard input.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from vllm_core import collector
from vllm_core.engine import wire
from vllm_core.engine.messages import EngineRequest, RequestUpdate
from vllm_core.engine.structured.grammars import MAX_COMPILE_S, too_slow
from vllm_core.errors import MemoryBudgetError, RequestError, UnsupportedError, VLLMCoreError
from vllm_core.pulse import Pulse

if TYPE_CHECKING:
    from vllm_core.engine.core import EngineCore
    from vllm_core.engine.parallel.group import WorkerGroup

log = logging.getLogger("vllm_core.engine")

GRAMMAR_POLL_MS = 2
"""Wait between two looks at grammars that are being compiled while nothing runs."""

_decode_request = msgspec.msgpack.Decoder(EngineRequest).decode
_decode_ids = msgspec.msgpack.Decoder(list[str]).decode


class Start(msgspec.Struct, frozen=True):
    """The first line on standard input: folder of the sockets, blueprint of the engine."""

    folder: str
    design: bytes


class Service:
    """Serves one engine core over a pair of sockets; everything happens in the calling thread.

    ``workers`` share the model with this process: one that is gone is noticed while there is nothing to do.
    """

    def __init__(self, core: EngineCore, inbox: Any, outbox: Any, pulse: Pulse, workers: WorkerGroup | None = None) -> None:
        self._core = core
        self._pulse = pulse
        self._inbox = inbox
        self._outbox = outbox
        self._workers = workers
        self._running = True
        self._compiling: dict[str, tuple[EngineRequest, Future[Any]]] = {}
        """Requests whose grammar is not there yet."""
        self._poller = zmq.Poller()
        self._poller.register(inbox, zmq.POLLIN)
        if workers is not None:
            self._poller.register(workers.fileno(), zmq.POLLIN)

    def run(self) -> None:
        """Serve until told to stop. Raises what the engine raises."""
        while self._running:
            self._pulse.begin()
            if self._compiling:
                self._add_compiled()
            self._receive(block=not (self._core.has_work or self._compiling))
            if self._compiling and not self._core.has_work:
                self._inbox.poll(GRAMMAR_POLL_MS)
            if self._core.has_work:
                updates = self._core.step()
                if updates:
                    self._send(wire.UPDATES, updates)

    def _receive(self, *, block: bool) -> None:
        while self._running and (block or self._inbox.poll(0)):
            if block:
                self._wait()
            kind, payload = self._inbox.recv_multipart()
            self._handle(kind, payload)
            block = False

    def _wait(self) -> None:
        """Until there is a message. Raises the failure of a worker."""
        self._pulse.rest()
        self._poller.poll()
        if self._workers is not None:
            self._workers.check()
        self._pulse.begin()

    def _handle(self, kind: bytes, payload: bytes) -> None:
        if kind == wire.ADD:
            request = _decode_request(payload)
            wanted = None if request.params is None else request.params.structured_outputs
            if wanted is None or self._core.grammars is None:
                self._add(request)
            else:
                self._compiling[request.request_id] = request, self._core.grammars.compile(wanted)
        elif kind == wire.ABORT:
            ids = _decode_ids(payload)
            for name in ids:
                self._compiling.pop(name, None)
            updates = self._core.abort(ids)
            if updates:
                self._send(wire.UPDATES, updates)
        elif kind == wire.STATS:
            self._send(wire.STATS_REPLY, self._core.stats())
        elif kind == wire.RESET:
            self._send(wire.RESET_REPLY, self._core.reset_prefix_cache())
        elif kind == wire.SLEEP:
            self._send(wire.SLEEP_REPLY, self._attempt(lambda: self._tell(self._core.sleep())))
        elif kind == wire.WAKE:
            self._send(wire.WAKE_REPLY, self._attempt(self._core.wake_up))
        elif kind == wire.STOP:
            self._running = False

    def _tell(self, updates: list[RequestUpdate]) -> None:
        if updates:
            self._send(wire.UPDATES, updates)

    def _attempt(self, work: Callable[[], None]) -> wire.Failure | None:
        """Do it; a refusal is the answer, and the engine goes on as it was."""
        try:
            work()
        except (UnsupportedError, MemoryBudgetError) as error:
            return wire.Failure.of(error)
        return None

    def _add(self, request: EngineRequest, grammar: Future[Any] | None = None) -> None:
        try:
            # What has failed to compile is not compiled again here, where everybody would wait for it.
            self._core.add(request, None if grammar is None else grammar.result())
        except RequestError as error:
            self._send(wire.REFUSED, wire.Failure.of(error, request_id=request.request_id))

    def _add_compiled(self) -> None:
        """Let requests in whose grammar has been compiled, and refuse those that have waited for too long."""
        for name, (request, grammar) in list(self._compiling.items()):
            if grammar.done():
                del self._compiling[name]
                self._add(request, grammar)
            elif time.time() > request.arrival_time + MAX_COMPILE_S:
                del self._compiling[name]
                self._send(wire.REFUSED, wire.Failure.of(too_slow(), request_id=name))

    def _send(self, kind: bytes, payload: object) -> None:
        self._pulse.rest()  # it may wait for an owner that falls behind
        self._outbox.send_multipart((kind, wire.encode(payload)))
        self._pulse.begin()


def _exit_with_owner(folder: str) -> None:
    """Standard input ends when the owner does, however it ended; one that was killed has left its folder."""
    # Not sys.stdin: its lock, held by this thread, would abort the interpreter when the main thread ends.
    while os.read(0, 4096):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _end_stuck(folder: str, error: VLLMCoreError) -> None:
    """A worker is gone, and this process waits for it in a collective that does not return: say why, and end.

    Called in another thread, hence sockets of its own.
    """
    context = zmq.Context()
    outbox = context.socket(zmq.PUSH)
    outbox.connect(f"ipc://{folder}/out")
    outbox.send_multipart((wire.FAILED, wire.encode(wire.Failure.of(error))))
    context.destroy(linger=2000)
    os._exit(1)


def main() -> int:
    """Run the process; returns its exit status."""
    from vllm_core import launch
    from vllm_core.registry import explain

    logging.basicConfig(
        level=os.environ.get("VLLM_CORE_LOG_LEVEL", "INFO"), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C belongs to the owner, which stops this process in order.
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=Start)
    threading.Thread(target=_exit_with_owner, args=(start.folder,), daemon=True).start()
    context = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    outbox.set_hwm(wire.MAX_UNREAD)  # an owner that falls behind slows the engine, instead of filling the memory
    inbox.connect(f"ipc://{start.folder}/in")
    outbox.connect(f"ipc://{start.folder}/out")
    try:
        with collector.starting() as started:
            design = launch.from_bytes(start.design)
            engine = launch.assemble(design, on_stuck=lambda error: _end_stuck(start.folder, error), folder=start.folder)
            started()
            ready = wire.Ready(
                engine.budget.max_model_len,
                list(engine.budget.num_blocks),
                engine.budget.size_bytes,
                dict(engine.timings),
                explain.to_json(engine.blueprint.plan),
            )
            outbox.send_multipart((wire.READY, wire.encode(ready)))
            Service(engine.core, inbox, outbox, Pulse(f"ipc://{start.folder}/out"), engine.workers).run()
            engine.close()
    except Exception as error:  # the owner gets the cause, whatever it is
        level = logging.DEBUG if isinstance(error, VLLMCoreError) else logging.ERROR
        log.log(level, "engine failed", exc_info=error)
        outbox.send_multipart((wire.FAILED, wire.encode(wire.Failure.of(error))))
        return 1
    finally:
        context.destroy(linger=2000)
    return 0


if __name__ == "__main__":
    sys.exit(main())
