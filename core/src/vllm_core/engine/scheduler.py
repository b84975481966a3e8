"""Which requests get how many tokens in the next step, and what becomes of them when it has been read.

The host never waits for a token to schedule: with steps in flight a sampled token counts as present, and what was
scheduled for a request that turned out finished is dropped when it is read. Blocks and slots of such a request, and of a
preempted one, are given back after the last step that may touch them.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from vllm_core.api import StepDelta, StepKey, StepResult, batch
from vllm_core.engine import results
from vllm_core.engine.kvtables import GroupLimits, KVTables
from vllm_core.engine.messages import EngineRequest, EngineStats, RequestUpdate
from vllm_core.engine.packing import Rows, pack
from vllm_core.engine.queue import WaitingQueue
from vllm_core.engine.request import Request
from vllm_core.engine.structured.constraint import DEAD_END, Constraint, mask_rows
from vllm_core.errors import RequestError

_NOT_FINITE = "{}: not finite, NaN or infinity in the model's output"

__all__ = ["GroupLimits", "ScheduledStep", "Scheduler", "SchedulerLimits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """What one step may hold, and how requests are ordered. Counts are tokens or sequences."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    long_prefill_token_threshold: int = 0
    chunked_prefill: bool = True
    policy: Literal["fcfs", "priority"] = "fcfs"
    prefix_caching: bool = True
    pooling_whole_prompt: bool = False


@dataclass(slots=True)
class ScheduledStep:
    """One step: the difference for the device, its key, and its rows for `complete`."""

    delta: StepDelta
    key: StepKey
    rows: Rows

    @property
    def num_tokens(self) -> int:
        """Tokens of the step."""
        return self.key.tokens

    @property
    def num_rows(self) -> int:
        """Rows of the step."""
        return len(self.rows)

    @property
    def num_sampled(self) -> int:
        """Rows of the step that bring a token."""
        return int(self.delta.packed[batch.H_NUM_SAMPLED])


class Scheduler:
    """Continuous batching with chunked prefill, prefix caching and preemption. Imports no torch; one thread calls it."""

    def __init__(
        self, limits: SchedulerLimits, groups: Sequence[GroupLimits], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limits = limits
        self._tables = KVTables(groups, caching=limits.prefix_caching)
        self._clock = clock
        self._requests: dict[str, Request] = {}
        self._waiting = WaitingQueue()
        self._running: list[Request] = []
        self._slots = list(range(limits.max_num_seqs - 1, -1, -1))
        self._scheduled = self._read = 0
        self._num_leaving = self._num_returning = 0
        self._stuck: Request | None = None
        self._arrivals = self._preemptions = self._prompt_tokens = self._generated = 0
        self._finished: Counter[str] = Counter()

    # -- requests

    def add(self, request: EngineRequest, constraint: Constraint | None = None) -> None:
        """Queue a request, with the state of its grammar if it has one. Raises RequestError for one that can never run."""
        self._check(request)
        self._arrivals += 1
        priority = request.priority if self._limits.policy == "priority" else 0
        entry = Request(
            request, (priority, self._arrivals), len(self._tables.groups), self._limits.max_model_len, self._clock()
        )
        if constraint is not None:
            entry.constrain(constraint)
        self._requests[request.request_id] = entry
        self._waiting.push(entry)

    def abort(self, request_ids: Iterable[str]) -> list[RequestUpdate]:
        """End requests; unknown ids are passed over, since a request may have finished meanwhile."""
        found = [self._requests[name] for name in dict.fromkeys(request_ids) if name in self._requests]
        return self._end_all(found, "abort")

    def fail_all(self, reason: str) -> list[RequestUpdate]:
        """End every request with an error."""
        return self._end_all(list(self._requests.values()), "error", error=reason)

    @property
    def has_work(self) -> bool:
        """Whether a request is not finished."""
        return bool(self._requests)

    @property
    def tables(self) -> KVTables:
        """The block tables, for what takes blocks out of the cache or puts some in while no step is in flight."""
        return self._tables

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a slot, preempted ones included."""
        return len(self._waiting) + self._num_returning

    def preempt_all(self) -> None:
        """Send every running request back to the queue, to be computed again. No step may be in flight."""
        assert self._read == self._scheduled, "steps in flight hold their blocks"
        while self._running:
            victim = self._running.pop()
            self._preemptions += 1
            self._release(victim)
            self._waiting.push(victim)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; False while some are in use."""
        return self._tables.reset_cache()

    def stats(self) -> EngineStats:
        """Counters since start and gauges now."""
        return EngineStats(
            running=len(self._running),
            waiting=self.num_waiting,
            kv_usage=self._tables.usage,
            prefix_queries=self._tables.queries,
            prefix_hits=self._tables.hits,
            preemptions=self._preemptions,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generated,
            finished=dict(self._finished),
        )

    def _check(self, request: EngineRequest) -> None:
        limits, length = self._limits, len(request.prompt_token_ids)
        if request.request_id in self._requests:
            raise _refused(
                "Request id is in use", request, request.request_id, "an id of no running request", "send another id"
            )
        pooling = request.params is None
        other = next(iter(self._requests.values()), None)
        if other is not None and other.is_pooling != pooling:
            raise _refused(
                "One engine generates or pools",
                request,
                "a pooling request" if pooling else "a sampling request",
                f"what request {other.request_id} asks for",
                "use an engine of its own for it",
            )
        room = limits.max_model_len - (0 if pooling else 1)
        if not 0 < length <= room:
            raise _refused(
                "Prompt does not fit the context", request, f"{length} tokens", f"1 to {room} tokens", "shorten the prompt"
            )
        whole = pooling or not limits.chunked_prefill
        if whole and length > limits.max_num_batched_tokens:
            expected = f"at most {limits.max_num_batched_tokens} tokens (max_num_batched_tokens)"
            raise _refused(
                "Prompt does not fit a step", request, f"{length} tokens", expected, "raise --max-num-batched-tokens"
            )
        total = length + (0 if pooling else request.max_tokens)
        for group in self._tables.groups:
            needed = self._tables.blocks_for(group, min(total, limits.max_model_len), limits.max_num_batched_tokens)
            if needed > group.num_blocks - 1:
                raise _refused(
                    "KV cache does not hold the request",
                    request,
                    f"{group.num_blocks - 1} blocks of {group.tokens_per_block} tokens",
                    f"{needed} blocks",
                    "ask for fewer tokens, or raise --kv-cache-memory-bytes",
                )

    # -- scheduling

    def schedule(self) -> ScheduledStep | None:
        """Choose the next step; None where nothing can be computed until a step in flight is read."""
        rows = Rows()
        running, requests, number = self._running, rows.requests, self._scheduled + 1
        before, budget, short = len(running), self._limits.max_num_batched_tokens, False
        # Once a step for every running request. `_make_room` shortens the list from its end, which ends this loop early.
        for request in running:
            length, start = request.length, request.scheduled
            if start == length or length >= request.max_length:
                continue
            if length == start + 1 and start < request.limit:
                # `_take` for plain decoding, without the call.
                request.scheduled, request.length, request.last_step = length, length + 1, number
                requests.append(request)
                rows.features |= request.features
                budget -= 1
            else:
                count = self._chunk(length - start, budget)
                # Where one lacks blocks none behind it gets any, or it would lack them for ever.
                if count and start + count > request.limit and (short or not self._make_room(request, start + count)):
                    short, count = True, 0
                if count:
                    self._take(rows, request, count)
                    budget -= count
            if not budget:
                break
        # Blocks that were just taken from one request must not bring in another, which would lose them again; and nobody
        # overtakes one that goes back to the queue once its steps have been read.
        held = short or self._num_returning or len(running) < before
        admitted = [] if held else self._admit(rows, budget)
        return self._step(rows, admitted) if len(rows) else None

    def _chunk(self, count: int, budget: int) -> int:
        """How many of ``count`` tokens this step computes; 0 where they must be computed whole and do not fit."""
        limits = self._limits
        # A preempted sequence may have outgrown a step: what was computed before may come back in chunks.
        if (limits.pooling_whole_prompt or not limits.chunked_prefill) and count <= limits.max_num_batched_tokens:
            return count if count <= budget else 0
        return min(count, budget, limits.long_prefill_token_threshold or budget)

    def _take(self, rows: Rows, request: Request, count: int) -> None:
        """Add a row, and note in the request what it will have done once the step is read."""
        request.scheduled += count
        request.last_step = self._scheduled + 1
        sampled = request.scheduled == request.length and not request.is_pooling
        if sampled:
            request.length += 1
        if count > 1 or not sampled:
            rows.chunks[len(rows)] = count, sampled
        if count > 1:
            self._tables.announce(request)
        rows.requests.append(request)
        rows.features |= request.features

    def _make_room(self, request: Request, num_tokens: int) -> bool:
        """Grow the request's tables, preempting whoever comes last; False where the request cannot run in this step."""
        while not self._tables.grow(request, num_tokens):
            if self._num_leaving:
                return False  # blocks come back when the steps in flight are read
            victim = self._running[-1]
            if victim is request and victim.last_step > self._read:
                return False  # its window may give blocks back when they are read
            self._running.pop()
            self._preemptions += 1
            if victim.last_step > self._read:
                self._set_leaving(victim)
                self._num_returning += 1
                return False
            self._release(victim)
            self._waiting.push(victim)
            if victim is request:
                return False
        return True

    def _admit(self, rows: Rows, budget: int) -> list[tuple[Request, int]]:
        """Let waiting requests in, first come first, while tokens, slots and blocks last."""
        admitted: list[tuple[Request, int]] = []
        while budget and self._slots:
            request = self._waiting.peek()
            if request is None or (request is self._stuck and self._tables.still_short):
                break
            num_blocks, matched = self._tables.match(request)
            start = num_blocks * self._tables.size
            count = self._chunk(len(request.tokens) - start, budget)
            request.slot = self._slots[-1]
            if not count or not self._tables.admit(request, matched, start, count):
                request.slot = -1
                self._stuck = request if count else None
                break
            self._slots.pop()
            self._waiting.pop()
            insort(self._running, request, key=_order)
            self._start(request, start)
            admitted.append((request, start))
            budget -= count
            self._take(rows, request, count)
        return admitted

    def _start(self, request: Request, start: int) -> None:
        """Count a request's first admission."""
        if request.admitted_at is not None:
            return
        request.admitted_at = self._clock()
        request.num_cached_tokens = start
        self._prompt_tokens += request.prompt_len
        if self._tables.looks_up(request):
            self._tables.queries += request.prompt_len
            self._tables.hits += start

    def _step(self, rows: Rows, admitted: list[tuple[Request, int]]) -> ScheduledStep:
        self._scheduled += 1
        rows.close()
        features = logprobs = 0
        for request, count, sampled in rows if rows.features else ():
            wanted = request.features & ~batch.F_PROMPT_LOGPROBS if sampled else 0
            if request.wants_prompt_logprobs and request.scheduled - count < request.prompt_len:
                wanted |= batch.F_PROMPT_LOGPROBS
            features |= wanted
            logprobs = max(logprobs, results.num_logprobs(request))
        blocks, self._tables.changes = self._tables.changes, []
        packed = pack(admitted, blocks, rows)
        tail: Literal["pool", "sample"] = "pool" if rows.requests[0].is_pooling else "sample"
        key = StepKey(len(rows), int(packed[batch.H_NUM_TOKENS]), int(packed[batch.H_MAX_QUERY]), tail, features)
        if features & batch.F_MASK:
            return ScheduledStep(StepDelta(packed, logprobs, mask_rows(rows)), key, rows)
        return ScheduledStep(StepDelta(packed, logprobs), key, rows)

    # -- reading

    def complete(self, step: ScheduledStep, result: StepResult) -> list[RequestUpdate]:
        """Take a step's results, in the order of `schedule`; returns what it brought each request."""
        self._read += 1
        reader = results.Reader(result, step.key)
        tokens = reader.tokens
        updates: list[RequestUpdate] = []
        index = -1
        alive = len(self._requests)
        plain = not reader.any_nonfinite and not step.key.features & batch.F_LOGPROBS
        # Once a step for every running request.
        for row, (request, count, sampled) in enumerate(step.rows):
            if reader.has_prompt_logprobs:
                reader.take_prompt(request, count)
            if not sampled:
                request.done += count
                if reader.pooled and not request.finished:
                    updates.append(self._pool(request, reader.pooled[row]))
            else:
                index += 1
                if not request.finished:
                    token, known = tokens[index], request.tokens
                    request.done = len(known)
                    known.append(token)
                    if plain and len(known) < request.look_at and token not in request.stops:
                        updates.append(RequestUpdate(request_id=request.request_id, token_ids=[token]))
                    else:
                        updates.append(self._append(request, reader, index))
            if request.leaving:
                self._leave(request)
            elif request.done >= request.settle_at:
                self._tables.settle(request)
        all_tokens = plain and not reader.pooled
        self._generated += len(updates) if all_tokens else sum(len(update.token_ids) for update in updates)
        if len(self._requests) < alive:
            self._running = [request for request in self._running if not request.finished]
        return updates

    def withdraw(self, step: ScheduledStep) -> None:
        """Forget the newest step, which raised and will not be read."""
        self._scheduled -= 1
        for request, count, sampled in step.rows:
            request.scheduled -= count
            request.length -= sampled
            request.last_step = self._scheduled
            self._tables.retract(request)
            if request.leaving:
                self._leave(request)

    def _append(self, request: Request, reader: results.Reader, index: int) -> RequestUpdate:
        """What the last of a request's tokens, just appended, brings; the stops are checked that the host alone can check."""
        tokens = request.tokens
        token = tokens[-1]
        if reader.nonfinite[index]:
            tokens.pop()
            self._tables.distrust(request)
            return self._end(request, "error", error=_NOT_FINITE.format("logits"))
        if request.constraint is not None and not request.constraint.accept(token):
            tokens.pop()
            return self._end(request, "error", error=DEAD_END)
        update = RequestUpdate(request_id=request.request_id, token_ids=[token])
        if request.features & batch.F_LOGPROBS:
            update.logprobs = reader.logprobs(request, index)
        if request.first_token_at is None:
            self._first(request, update)
        if token in request.stops and len(tokens) > request.min_length:
            update.stop_reason = token
            return self._end(request, "stop", update=update)
        if request.constraint is not None and request.constraint.ended:
            return self._end(request, "stop", update=update)
        if len(tokens) >= request.max_length:
            return self._end(request, "length", update=update)
        return update

    def _pool(self, request: Request, vector: list[float] | None) -> RequestUpdate:
        if vector is None:
            return self._end(request, "error", error=_NOT_FINITE.format("the pooled vector"))
        return self._end(request, "stop", pooled=vector)

    def _first(self, request: Request, update: RequestUpdate) -> None:
        request.first_token_at = self._clock()
        if request.constraint is None:
            request.look_at = request.max_length
        update.num_cached_tokens = request.num_cached_tokens
        if request.wants_prompt_logprobs:
            update.prompt_logprobs, request.wants_prompt_logprobs = request.prompt_logprobs, False

    def _end_all(self, requests: list[Request], reason: str, *, error: str | None = None) -> list[RequestUpdate]:
        updates = [self._end(request, reason, error=error) for request in requests]
        self._running = [request for request in self._running if not request.finished]
        for request in requests:
            if request.leaving:
                self._leave(request)
        return updates

    def _end(
        self,
        request: Request,
        reason: str,
        *,
        update: RequestUpdate | None = None,
        error: str | None = None,
        pooled: list[float] | None = None,
    ) -> RequestUpdate:
        """Finish a request. The caller takes it off the running ones, and lets it leave once no step may touch it."""
        update = update or RequestUpdate(request_id=request.request_id)
        update.finish_reason, update.error, update.pooled = reason, error, pooled
        now = self._clock()
        admitted = now if request.admitted_at is None else request.admitted_at
        first = now if request.first_token_at is None else request.first_token_at
        update.queue_s, update.prefill_s, update.decode_s = admitted - request.queued_at, first - admitted, now - first
        self._finished[reason] += 1
        del self._requests[request.request_id]
        request.finished = True
        if request.slot < 0:
            self._waiting.drop(request)
        elif request.leaving:
            self._num_returning -= 1
        else:
            self._set_leaving(request)
        return update

    def _set_leaving(self, request: Request) -> None:
        request.leaving = True
        self._num_leaving += 1

    def _leave(self, request: Request) -> None:
        """Give back a leaving request's blocks and slot once no step in flight may touch them; a preempted one waits again."""
        if request.last_step > self._read:
            return
        self._tables.settle(request)
        self._num_leaving -= 1
        self._release(request)
        if not request.finished:
            self._num_returning -= 1
            self._waiting.push(request)

    def _release(self, request: Request) -> None:
        self._tables.release(request)
        self._slots.append(request.slot)
        request.reset(len(self._tables.groups))


def _order(request: Request) -> tuple[int, int]:
    return request.order


def _refused(what: str, request: EngineRequest, found: str, expected: str, fix: str) -> RequestError:
    return RequestError(what, on=f"request {request.request_id}", found=found, expected=expected, fix=fix)
