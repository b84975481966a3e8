"""A device in plain Python that executes packed steps, and an engine around it: no torch, no plugin.

The device keeps its own batch state, as `vllm_core.api.batch` describes it, and "writes KV" as (salt, hash of the history,
position). Each row checks that every position it attends to holds exactly that, so a block that was given away too early,
shared wrongly or never written shows itself at once. The model's next token is a hash of seed and history.
"""

from __future__ import annotations

import zlib
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np
import pytest

from vllm_core.api import HostLogprobs, KVGroupSpec, StepResult, batch
from vllm_core.engine.messages import EngineRequest, RequestUpdate
from vllm_core.engine.scheduler import GroupLimits, ScheduledStep, Scheduler, SchedulerLimits
from vllm_core.sampling_params import PoolingParams, SamplingParams

VOCAB = 7


def history_hash(tokens: Sequence[int], seed: int = 0) -> int:
    return zlib.crc32(array("i", tokens).tobytes(), seed % 2**32)


def next_token(tokens: Sequence[int], seed: int, banned: Sequence[int] = ()) -> int:
    """The model: depends on nothing but the history and the seed."""
    first = history_hash(tokens, seed)
    return next(token for k in range(VOCAB) if (token := (first + k) % VOCAB) not in banned)


def token_logprob(tokens: Sequence[int], token: int) -> float:
    return -((history_hash(tokens) + token) % 97) / 8


def expected(request: EngineRequest, max_model_len: int) -> tuple[list[int], str, int | None]:
    """What a request brings when nothing else exists: tokens, finish reason, stop token."""
    known, stops = list(request.prompt_token_ids), request.stop_token_ids
    assert request.params is not None
    while True:
        count = len(known) - len(request.prompt_token_ids)
        early = count < request.params.min_tokens
        token = next_token(known, request.seed, stops if early else ())
        known.append(token)
        out = known[len(request.prompt_token_ids) :]
        if token in stops and not early:
            return out, "stop", token
        if len(out) == request.max_tokens or len(known) == max_model_len:
            return out, "length", None


class FakeDevice:
    """Applies differences and runs steps in the order in which they are given."""

    def __init__(self, groups: Sequence[GroupLimits], limits: SchedulerLimits) -> None:
        self.groups = groups
        self.limits = limits
        self.tokens: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.params: dict[int, np.ndarray] = {}
        self.stops: dict[int, list[int]] = {}
        self.tables: list[dict[int, dict[int, int]]] = [{} for _ in groups]
        self.kv: list[dict[tuple[int, int], tuple[str, int, int]]] = [{} for _ in groups]
        self.nonfinite: set[str] = set()
        self.touched: dict[int, set[tuple[int, int]]] = {}
        self.written: dict[int, set[tuple[int, int]]] = {}

    def run(self, step: ScheduledStep) -> StepResult:
        self.touched, self.written = {}, {}
        rows = self._update(step.delta.packed)
        assert len(rows) == len(step.rows) == step.key.slots
        result = _Results(step.delta.num_logprobs)
        for (slot, count, sampled, first_row), (request, _, _) in zip(rows.tolist(), step.rows, strict=True):
            assert slot == request.slot
            assert first_row == 0
            first = self.computed[slot]
            known = self.tokens[slot]
            end = first + count
            assert count >= 1
            assert end <= len(known) <= self.limits.max_model_len + 1
            self._attend(slot, known, first, end, request)
            self._prompt_logprobs(step, result, slot, first, end)
            self.computed[slot] = end
            if step.key.tail == "pool":
                value = np.nan if request.request_id in self.nonfinite else history_hash(known[:end]) % 97
                result.pooled.append([float(value), float(end)])
            if sampled:
                assert end == len(known), "a row samples before its last token"
                known.append(self._sample(result, slot, known, request.request_id))
        if len(rows) and rows[:, 1].max() == 1:
            self._check_single_queries()
        return result.build(step)

    def _check_single_queries(self) -> None:
        """Where each row has one token a kernel writes and attends at once: no row may read what another one writes."""
        for one, written in self.written.items():
            assert all(not written & touched for other, touched in self.touched.items() if other != one)

    def _update(self, packed: np.ndarray) -> np.ndarray:
        assert packed.dtype == np.int32
        header = packed[: batch.HEADER_WORDS]
        assert header[batch.H_VERSION] == batch.LAYOUT_VERSION
        counts = [int(header[i]) for i in (batch.H_ADMITTED, batch.H_TOKENS, batch.H_BLOCKS, batch.H_EXTRA, batch.H_SCHEDULED)]
        at, parts = batch.HEADER_WORDS, []
        for count, width in zip(counts, (batch.ADMIT_WORDS, 1, 4, 5, 4), strict=True):
            parts.append(packed[at : at + count * width].reshape(count, width))
            at += count * width
        assert at == len(packed)
        admits, tokens, blocks, extras, steps = parts
        begin = 0
        for record in admits:
            slot, known = int(record[batch.A_SLOT]), int(record[batch.A_NUM_KNOWN])
            self.tokens[slot] = tokens[begin : begin + known, 0].tolist()
            begin += known
            self.computed[slot] = int(record[batch.A_NUM_COMPUTED])
            self.params[slot] = record.copy()
            self.stops[slot] = []
            for table in self.tables:
                table[slot] = {}
        assert begin == len(tokens)
        for group, slot, index, block in blocks.tolist():
            assert 0 < block < self.groups[group].num_blocks
            self.tables[group][slot][index] = block
        for kind, slot, index, value, _ in extras.tolist():
            if kind == batch.E_STOP:
                assert index == len(self.stops[slot])
                self.stops[slot].append(value)
        self._check_header(header, steps)
        return steps

    def _check_header(self, header: np.ndarray, steps: np.ndarray) -> None:
        slots = steps[:, 0].tolist()
        assert len(set(slots)) == len(slots) <= self.limits.max_num_seqs
        assert all(0 <= slot < self.limits.max_num_seqs for slot in slots)
        assert header[batch.H_NUM_TOKENS] == steps[:, 1].sum() <= self.limits.max_num_batched_tokens
        assert header[batch.H_NUM_SAMPLED] == steps[:, 2].sum()
        assert header[batch.H_MAX_QUERY] == steps[:, 1].max()
        assert header[batch.H_MAX_SEQ] >= max(self.computed[s] + n for s, n in steps[:, :2].tolist())

    def _attend(self, slot: int, known: list[int], first: int, end: int, request) -> None:
        """Write positions first..end-1, then read all that their queries attend to."""
        salt = request.request.salt
        hashes = [history_hash(known[: i + 1]) for i in range(end)]
        touched, written = set(), set()
        for group, limits in enumerate(self.groups):
            size, window, table = limits.tokens_per_block, limits.spec.window, self.tables[group][slot]
            for position in range(first, end):
                block = table.get(position // size, batch.NULL_BLOCK)
                assert block != batch.NULL_BLOCK, f"position {position} has no block"
                self.kv[group][block, position % size] = (salt, hashes[position], position)
                written.add((group, block))
            begin = 0 if window is None else max(0, first - window + 1)
            for position in range(begin, end):
                block = table.get(position // size, batch.NULL_BLOCK)
                assert block != batch.NULL_BLOCK, f"position {position} is read from the null block"
                assert self.kv[group].get((block, position % size)) == (salt, hashes[position], position)
                touched.add((group, block))
        self.touched[id(request)], self.written[id(request)] = touched | written, written

    def _sample(self, result: _Results, slot: int, known: list[int], request_id: str) -> int:
        record = self.params[slot]
        seed = int(record.view(np.uint32)[batch.A_SEED_LOW]) | int(record.view(np.uint32)[batch.A_SEED_HIGH]) << 32
        banned = self.stops[slot] if len(known) < record[batch.A_MIN_LEN] else ()
        token = next_token(known, seed, banned)
        result.tokens.append(token)
        result.nonfinite.append(request_id in self.nonfinite)
        result.logprobs.append((token_logprob(known, token), token + 1))
        return token

    def _prompt_logprobs(self, step: ScheduledStep, result: _Results, slot: int, first: int, end: int) -> None:
        if step.key.features & int(self.params[slot][batch.A_FEATURES]) & batch.F_PROMPT_LOGPROBS:
            known = [*self.tokens[slot], 0]
            result.prompt += [(token_logprob(known[: p + 1], known[p + 1]), known[p + 1] + 1) for p in range(first, end)]


class _Results:
    def __init__(self, num_logprobs: int) -> None:
        self.num_logprobs = num_logprobs
        self.tokens: list[int] = []
        self.nonfinite: list[bool] = []
        self.logprobs: list[tuple[float, int]] = []
        self.prompt: list[tuple[float, int]] = []
        self.pooled: list[list[float]] = []

    def build(self, step: ScheduledStep) -> StepResult:
        features = step.key.features
        return StepResult(
            tokens=np.array(self.tokens, dtype=np.int32).reshape(-1, 1),
            counts=np.ones(len(self.tokens), dtype=np.int32),
            nonfinite=np.array(self.nonfinite, dtype=bool),
            logprobs=self._host(self.logprobs) if features & batch.F_LOGPROBS else None,
            prompt_logprobs=self._host(self.prompt) if features & batch.F_PROMPT_LOGPROBS else None,
            pooled=np.array(self.pooled, dtype=np.float32) if self.pooled else None,
        )

    def _host(self, entries: list[tuple[float, int]]) -> HostLogprobs:
        k = self.num_logprobs
        return HostLogprobs(
            np.array([value for value, _ in entries], dtype=np.float32),
            np.array([rank for _, rank in entries], dtype=np.int32),
            np.tile(np.arange(k, dtype=np.int32), (len(entries), 1)),
            np.tile(-np.arange(k, dtype=np.float32), (len(entries), 1)),
        )


class FakeEngine:
    """A scheduler, the device, and up to `depth` steps in flight, as the engine core drives them."""

    def __init__(self, groups: Sequence[GroupLimits], *, depth: int = 1, clock: Callable[[], float] | None = None, **limits):
        self.limits = SchedulerLimits(
            **{"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64, "prefix_caching": True, **limits}
        )
        self.groups = groups
        self.depth = depth
        self.scheduler = Scheduler(self.limits, groups, **({"clock": clock} if clock else {}))
        self.device = FakeDevice(groups, self.limits)
        self.in_flight: deque[tuple[ScheduledStep, StepResult, dict]] = deque()
        self.steps: list[ScheduledStep] = []
        self.tokens: dict[str, list[int]] = {}
        self.updates: dict[str, list[RequestUpdate]] = {}
        self.ends: dict[str, RequestUpdate] = {}

    def add(self, *requests: EngineRequest) -> None:
        for request in requests:
            self.scheduler.add(request)
            self.tokens[request.request_id] = []
            self.updates[request.request_id] = []

    def abort(self, *names: str) -> None:
        self._take(self.scheduler.abort(names))

    def launch(self) -> ScheduledStep | None:
        """Schedule and run one step; what it writes, no other request's step in flight may touch."""
        step = self.scheduler.schedule()
        if step is None:
            return None
        result = self.device.run(step)
        for request, written in self.device.written.items():
            for _, _, touched in self.in_flight:
                assert all(not written & blocks for other, blocks in touched.items() if other != request)
        self.in_flight.append((step, result, self.device.touched))
        self.steps.append(step)
        return step

    def read(self) -> list[RequestUpdate]:
        step, result, _ = self.in_flight.popleft()
        return self._take(self.scheduler.complete(step, result))

    def step(self) -> list[RequestUpdate]:
        while len(self.in_flight) < self.depth and self.launch() is not None:
            pass
        return self.read() if self.in_flight else []

    def advance(self) -> None:
        """The smallest move: one step more in flight, or else one less."""
        if len(self.in_flight) == self.depth or self.launch() is None:
            self.read()

    def run(self, max_steps: int = 500) -> None:
        """Until nothing is left; the pools are empty then."""
        for _ in range(max_steps):
            if not self.in_flight and not self.scheduler.has_work:
                break
            self.step()
        assert not self.in_flight, "the engine did not come to an end"
        assert not self.scheduler.has_work, "the engine did not come to an end"
        stats = self.scheduler.stats()
        assert (stats.running, stats.waiting, stats.kv_usage) == (0, 0, 0.0)
        assert self.ends.keys() == self.tokens.keys()

    @staticmethod
    def counts(step: ScheduledStep) -> dict[str, int]:
        return {request.request_id: count for request, count, _ in step.rows}

    def names(self, step: ScheduledStep | None) -> list[str]:
        return [] if step is None else [request.request_id for request, _, _ in step.rows]

    def _take(self, updates: list[RequestUpdate]) -> list[RequestUpdate]:
        for update in updates:
            name = update.request_id
            assert name not in self.ends, f"{name} hears of a step after its end"
            self.tokens[name] += update.token_ids
            self.updates[name].append(update)
            if update.finish_reason is not None:
                self.ends[name] = update
        return updates


def make_group(num_blocks: int = 64, size: int = 4, window: int | None = None, index: int = 0) -> GroupLimits:
    spec = KVGroupSpec(
        index=index,
        kind="full" if window is None else "window",
        layers=(index,),
        num_kv_heads=1,
        head_size=8,
        window=window,
    )
    return GroupLimits(spec=spec, tokens_per_block=size, num_blocks=num_blocks)


def make_request(
    name: str = "a", prompt: Sequence[int] | int = 5, *, max_tokens: int = 4, stops: Sequence[int] = (), **options
) -> EngineRequest:
    """A greedy request; a number as prompt makes that many tokens. Options of EngineRequest and SamplingParams mix."""
    tokens = [i % VOCAB for i in range(prompt)] if isinstance(prompt, int) else list(prompt)
    own = {key: options.pop(key) for key in ("priority", "salt", "seed", "bad_words") if key in options}
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, **options})
    return EngineRequest(
        request_id=name,
        prompt_token_ids=tokens,
        arrival_time=0.0,
        params=params,
        max_tokens=max_tokens,
        stop_token_ids=list(stops),
        **own,
    )


def make_pooling(name: str, prompt: int) -> EngineRequest:
    tokens = [i % VOCAB for i in range(prompt)]
    return EngineRequest(request_id=name, prompt_token_ids=tokens, arrival_time=0.0, pooling=PoolingParams())


@pytest.fixture(scope="session")
def fake():
    """The fakes above; made once, so that property tests may use them."""
    return SimpleNamespace(
        engine=FakeEngine,
        counts=FakeEngine.counts,
        group=make_group,
        request=make_request,
        pooling=make_pooling,
        expected=expected,
        logprob=token_logprob,
        next_token=next_token,
        vocab=VOCAB,
    )
