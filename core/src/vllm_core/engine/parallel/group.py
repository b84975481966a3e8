"""The workers beside the leading one: started, watched, and told to stop, by the process of rank 0.

A thread watches their channels. When one ends, reports an error, or says nothing for too long, the group has failed for
good: the cause is settled from all signs that come within a moment, the other workers are ended, and the communicator is
closed, so that whatever waits in a collective returns. Every later call raises the failure.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import selectors
import shutil
import socket
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from vllm_core.api import StepDelta, StepKey
from vllm_core.api.ops import OPS
from vllm_core.aside import begun
from vllm_core.engine import wire
from vllm_core.engine.binding import BindingLike, ProviderFailedError
from vllm_core.engine.memory import GroupMemory, KVBudget, smallest
from vllm_core.engine.parallel import channel as frames
from vllm_core.engine.parallel.channel import Start
from vllm_core.engine.parallel.worker import Worker
from vllm_core.errors import EngineError, VLLMCoreError

if TYPE_CHECKING:
    from vllm_core.api import Communicator

log = logging.getLogger("vllm_core")

SETTLE_S = 0.3
"""How long signs of a failure are collected: the one that fails first is not always the one that is heard first."""
EXPLAIN_S = 10.0
"""How long an error that a worker's end may have caused waits for news of it, unless all others are heard to live."""
LIVES = 2
"""Times that a worker is heard after an error before it counts as one that lives: the first may have been on its way."""
STUCK_S = 2.0
"""How long the leader may take to notice a failure, before its process is ended from outside."""
STOP_S = 3.0
"""How long workers may take to stop."""
ECHO = 2
"""Rank among causes of an error in a collective: whose peer has gone."""
KEPT_SUMS = 16
"""Check sums of the leader that wait for those of the workers, which may lag."""

_decode_failure = msgspec.msgpack.Decoder(wire.Failure).decode

_open: weakref.WeakSet[WorkerGroup] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Groups that nobody closed: a communicator's threads must not outlive the interpreter (`vllm_core.ops.comm`)."""
    for group in list(_open):
        group.close()


class WorkerGroup:
    """Ranks 1 and up of ``labels``, which name each rank with its device; rank 0 is this process.

    ``command`` starts a worker, which finds ``design`` in its first frame. ``bindings`` are the plan's, to name a provider
    that failed elsewhere. ``on_stuck`` is called in another thread when this process does not notice a failure. Files go into
    ``folder``, whose owner removes what a killed process leaves in it, or into one of their own.
    """

    def __init__(
        self,
        labels: Sequence[str],
        command: Sequence[str],
        environ: Mapping[str, str],
        design: bytes,
        bindings: Sequence[BindingLike] = (),
        on_stuck: Callable[[VLLMCoreError], None] | None = None,
        folder: str | None = None,
    ) -> None:
        self._bindings = {(one.op, one.role): one for one in bindings}
        self._on_stuck = on_stuck
        self._changed = threading.Condition()
        self._noticed = threading.Event()
        self._failure: VLLMCoreError | None = None
        self._closing = self._alone = False
        self._communicator: Communicator | None = None
        self._sums: dict[int, int] = {}
        self._watcher: threading.Thread | None = None
        self._signs: list[tuple[int, VLLMCoreError]] = []
        self._folder = tempfile.mkdtemp(prefix="vllm-core-", dir=folder)
        self.rendezvous = f"file://{self._folder}/meet"
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._workers: list[Worker] = []
        try:
            for rank in range(1, len(labels)):
                self._workers.append(Worker(rank, labels[rank], command, environ))
            for worker in self._workers:
                with contextlib.suppress(OSError):  # it has gone already: the watching thread says so
                    worker.channel.send(frames.START, frames.encode(Start(worker.rank, self.rendezvous, design)))
        except BaseException:
            self.close()
            raise
        self._watcher = threading.Thread(target=self._watch, name="vllm-core-workers", daemon=True)
        self._watcher.start()
        _open.add(self)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of ranks 1 and up."""
        return tuple(worker.process.pid for worker in self._workers)

    @property
    def has_failed(self) -> bool:
        """Whether there can be no more steps."""
        return self._failure is not None

    def fileno(self) -> int:
        """Becomes readable when the group has failed, for a leader that waits for something else."""
        return self._wake_reader.fileno()

    # -- start

    def join(self, make: Callable[[str], Communicator]) -> Communicator:
        """Form the communicator once every worker is about to; ``make`` gets the rendezvous. Raises the first failure."""
        self._collect(frames.JOINING)

        def tell(_: Future[Communicator]) -> None:
            with self._changed:
                self._changed.notify_all()

        made = begun(partial(make, self.rendezvous), "rendezvous")
        made.add_done_callback(tell)
        self._wait(made.done)
        error = made.exception()
        if error is not None:
            raise self.explain(error)
        self._communicator = made.result()
        return self._communicator

    def agree(self, budget: KVBudget, groups: Sequence[GroupMemory]) -> KVBudget:
        """The smallest of all workers' budgets, which all then use. Raises the first failure."""
        others = [frames.decode_budget(payload) for payload in self._collect(frames.BUDGET)]
        agreed = smallest([budget, *others], groups)
        for worker in self._workers:
            self._send(worker, frames.AGREED, frames.encode(agreed))
        return agreed

    def wait_until_ready(self) -> None:
        """Return when every worker follows. Raises the first failure."""
        self._collect(frames.READY)

    def _collect(self, kind: int) -> list[bytes]:
        """Wait for a frame of each worker."""
        self._wait(lambda: all(worker.inbox for worker in self._workers))
        found = [worker.inbox.pop(0) for worker in self._workers]
        assert all(one == kind for one, _ in found), f"frames {[one for one, _ in found]} where {kind} was due"
        return [payload for _, payload in found]

    def _wait(self, done: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or done())
        self.check()

    # -- serving

    def check(self) -> None:
        """Raise the failure, if there is one."""
        failure = self._failure
        if failure is not None:
            self._noticed.set()
            raise _again(failure)

    def broadcast(self, key: StepKey, delta: StepDelta) -> None:
        """Send a step to every worker. Raises the failure of one."""
        self.check()
        payload = frames.encode_step(key, delta)
        for worker in self._workers:
            self._send(worker, frames.STEP, payload)

    def explain(self, error: BaseException) -> BaseException:
        """The failure of a worker that caused ``error`` here, or ``error``; there are no more steps after that."""
        if isinstance(error, Exception):
            since = self._heard()
            with self._changed:
                self._changed.wait_for(
                    lambda: self._failure is not None or (not self._signs and self._all_live(since)), timeout=EXPLAIN_S
                )
        self._noticed.set()
        if self._failure is None:
            self._alone = True
            self._failure = _own(error)
            self.close(patience_s=0.0)
        if self._alone or error.args == self._failure.args:
            return error
        return _again(self._failure)

    def _heard(self) -> list[int]:
        return [worker.heard_times for worker in self._workers]

    def _all_live(self, since: Sequence[int], gone: Collection[Worker] = ()) -> bool:
        """Whether each worker but those that are ``gone`` was heard after ``since``."""
        return all(
            worker in gone or worker.heard_times >= before + LIVES for worker, before in zip(self._workers, since, strict=True)
        )

    def compare(self, steps: int, value: int) -> None:
        """Compare a check sum with those that have come from the workers. Raises EngineError where they differ."""
        with self._changed:
            self._sums[steps] = value
            for worker in self._workers:
                for at in worker.digests.keys() & self._sums.keys():
                    if worker.digests.pop(at) != self._sums[at]:
                        raise _disagreement(worker, at)
            while len(self._sums) > KEPT_SUMS:
                del self._sums[min(self._sums)]

    def _send(self, worker: Worker, kind: int, payload: bytes) -> None:
        try:
            worker.channel.send(kind, payload)
        except OSError as error:
            # The watching thread hears of it too, and settles the cause.
            self._wait(lambda: self._closing)
            raise worker.death() from error

    # -- end

    def close(self, *, patience_s: float = STOP_S) -> None:
        """Stop the workers, and kill those that still run after ``patience_s``; a second call does nothing."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
        _open.discard(self)
        for worker in self._workers:
            worker.channel.try_send(frames.STOP)
        deadline = time.monotonic() + patience_s
        for worker in self._workers:
            worker.end(max(0.0, deadline - time.monotonic()))
        if self._watcher is not None:
            self._watcher.join()  # it has heard the ends of all channels
        self._leave()
        for worker in self._workers:
            worker.channel.close()
        self._wake_reader.close()
        self._wake_writer.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _leave(self) -> None:
        from vllm_core.ops import comm

        if self._communicator is not None:
            comm.leave(self._communicator)

    # -- the watching thread

    def _watch(self) -> None:
        signs = self._signs
        deadline: float | None = None
        gone: set[Worker] = set()
        since: list[int] = []
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(worker.channel, selectors.EVENT_READ, worker)
            looked = time.monotonic()
            while selector.get_map() and not self._closing:
                left = frames.BEAT_S if deadline is None else deadline - time.monotonic()
                if left <= 0:
                    # What is heard alone is the echo of an end: whoever ended has not been heard of.
                    only_echoes = min(signs, key=lambda one: one[0])[0] == ECHO
                    if not only_echoes or self._all_live(since, gone) or left < SETTLE_S - EXPLAIN_S:
                        break
                    left = SETTLE_S
                found = {key.data: self._hear(key.data) for key, _ in selector.select(left)}
                looked, passed = time.monotonic(), time.monotonic() - looked
                for worker in [key.data for key in selector.get_map().values()]:
                    sign = found.get(worker) or (self._silence(worker, passed) if worker not in found else None)
                    if sign is not None:
                        selector.unregister(worker.channel)
                        gone.add(worker)
                        since = since or self._heard()
                        signs.append(sign)
                        deadline = deadline or time.monotonic() + SETTLE_S
        if signs and not self._closing:
            self._fail(min(signs, key=lambda one: one[0])[1])

    def _silence(self, worker: Worker, seconds: float) -> tuple[int, VLLMCoreError] | None:
        """A worker that sent nothing in the last ``seconds``: the failure, ranked like a death, where it has been too long."""
        error = worker.unheard(seconds)
        return None if error is None else (0, error)

    def _hear(self, worker: Worker) -> tuple[int, VLLMCoreError] | None:
        """Take one frame; a failure is returned with its rank among causes, 0 the most likely one."""
        try:
            kind, payload = worker.channel.receive()
        except EOFError:
            return 0, worker.death()
        if kind == frames.FAILED:
            failure = _decode_failure(payload)
            is_echo = failure.op in OPS and OPS[failure.op].family == "comm"
            return ECHO if is_echo else 1, self._error_of(worker, failure)
        with self._changed:
            worker.heard()
            if kind == frames.DIGEST:
                digest = frames.decode_digest(payload)
                worker.digests[digest.steps] = digest.value
            elif kind != frames.BEAT:
                worker.is_ready = kind == frames.READY
                worker.inbox.append((kind, payload))
            self._changed.notify_all()
        return None

    def _error_of(self, worker: Worker, failure: wire.Failure) -> VLLMCoreError:
        error = msgspec.structs.replace(failure, on=f"{failure.on}, {worker.label}").to_error()
        binding = self._bindings.get((failure.op, failure.role))
        if binding is None:
            return error
        named = ProviderFailedError(error.what, on=error.on, found=error.found, expected=error.expected, fix=error.fix)
        named.binding = binding
        return named

    def _fail(self, error: VLLMCoreError) -> None:
        log.warning("%s: %s: %s", error.what, error.on, error.found)
        for worker in self._workers:
            worker.end()
        with self._changed:
            self._failure = error
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._wake_writer.send(b"\0")
        self._leave()
        if self._on_stuck is not None and not self._noticed.wait(STUCK_S) and not self._closing:
            self._on_stuck(error)


def _own(error: BaseException) -> EngineError:
    """What later calls get after the leader itself has failed in the midst of a step."""
    return EngineError(
        "Engine has stopped",
        on="rank 0",
        found=f"{type(error).__name__}: {error}",
        expected="steps that end on every worker",
        fix="make a new engine",
    )


def _disagreement(worker: Worker, step: int) -> EngineError:
    return EngineError(
        "Workers disagree",
        on=f"{worker.label}, step {step}",
        found="other tokens than those of rank 0",
        expected="equal tokens from equal logits on every worker",
        fix="--provider sample=reference is the generic path; report this to the authors of the op `sample`",
    )


def _again(error: VLLMCoreError) -> VLLMCoreError:
    """A copy to raise: one exception raised twice would show both traces."""
    copy = type(error)(error.what, on=error.on, found=error.found, expected=error.expected, fix=error.fix)
    if isinstance(error, ProviderFailedError) and isinstance(copy, ProviderFailedError):
        copy.binding = error.binding
    return copy
