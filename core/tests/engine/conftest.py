"""A device in plain Python that executes packed steps, and an engine loop around the scheduler.

The device's "KV" of a position is that position and a hash of all tokens up to it, so a read of a foreign, stale or
missing block is seen at once. Its "model" is the hash of the history, so tokens must not depend on batching.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest

from vllm_core.api import HostLogprobs, KVGroupSpec, StepResult, batch
from vllm_core.engine.messages import EngineRequest
from vllm_core.engine.scheduler import GroupLimits, Scheduler, SchedulerLimits
from vllm_core.sampling_params import PoolingParams, SamplingParams

VOCAB = 11
POISON = 99
"""A token after which the fake model's logits are not finite."""


def fold(history: int, token: int) -> int:
    return hash((history, token)) if token != POISON else -1


def next_token(history: int) -> int:
    return history % VOCAB


def logprob(history: int, token: int) -> float:
    return -float(hash((token, history)) % 1000)


def histories(tokens: list[int]) -> list[int]:
    out, history = [], 7
    for token in tokens:
        # Poison spreads: what follows it is not finite either.
        history = -1 if history == -1 else fold(history, token)
        out.append(history)
    return out


def expected_tokens(prompt, max_tokens, stops=(), min_tokens=0, max_model_len=10**6) -> list[int]:
    """What a request generates alone, computed without any scheduler."""
    tokens = list(prompt)
    while True:
        history = histories(tokens)[-1]
        token = next_token(history)
        if len(tokens) - len(prompt) < min_tokens and token in stops:
            token = next(t for t in range(VOCAB) if t not in stops)
        tokens.append(token)
        done = len(tokens) - len(prompt)
        if (token in stops and done > min_tokens) or done >= max_tokens or len(tokens) >= max_model_len:
            return tokens[len(prompt) :]


@dataclass
class Slot:
    tokens: list[int]
    computed: int
    features: int
    min_len: int
    stops: list[int]
    admission: int
    tables: list[dict[int, int]]


@dataclass
class FakeDevice:
    groups: list[GroupLimits]
    slots: dict[int, Slot] = field(default_factory=dict)
    admissions: int = 0
    in_flight: deque[set[tuple[int, int, int]]] = field(default_factory=deque)
    reads: int = 0

    def __post_init__(self):
        self.kv = [{} for _ in self.groups]

    def run(self, packed, key, num_logprobs) -> StepResult:
        """Apply one packed difference and run its step; checks everything that a real device would get wrong silently."""
        header, admits, tokens, blocks, extras, steps = sections(packed)
        assert header[batch.H_VERSION] == batch.LAYOUT_VERSION
        self._admit(admits, tokens)
        self._tables(blocks)
        for kind, slot, index, value, _ in extras:
            if kind == batch.E_STOP:
                assert index == len(self.slots[slot].stops)
                self.slots[slot].stops.append(value)
        counts = [count for _, count, _, _ in steps]
        assert len({slot for slot, *_ in steps}) == len(steps) == key.slots, "a slot has two rows"
        assert sum(counts) == header[batch.H_NUM_TOKENS] == key.tokens
        assert max(counts) == header[batch.H_MAX_QUERY] == key.tokens_per_slot
        assert min(counts) > 0
        assert sum(row[2] for row in steps) == header[batch.H_NUM_SAMPLED]
        assert max(self.slots[slot].computed + count for slot, count, *_ in steps) == header[batch.H_MAX_SEQ]
        self._write(steps)
        return self._read(steps, key, num_logprobs)

    def _admit(self, admits, tokens):
        at = 0
        for record in admits:
            known = int(record[batch.A_NUM_KNOWN])
            self.admissions += 1
            self.slots[int(record[batch.A_SLOT])] = Slot(
                tokens=tokens[at : at + known].tolist(),
                computed=int(record[batch.A_NUM_COMPUTED]),
                features=int(record[batch.A_FEATURES]),
                min_len=int(record[batch.A_MIN_LEN]),
                stops=[],
                admission=self.admissions,
                tables=[{} for _ in self.groups],
            )
            assert 0 <= record[batch.A_NUM_COMPUTED] < known, "at least one token is computed"
            at += known
        assert at == len(tokens)

    def _tables(self, blocks):
        seen = set()
        for group, slot, index, block in blocks.tolist():
            assert (group, slot, index) not in seen, "two rows for one table entry: their order is not defined"
            seen.add((group, slot, index))
            assert 0 <= block < self.groups[group].num_blocks
            self.slots[slot].tables[group][index] = block

    def _write(self, steps):
        touched: set[tuple[int, int, int]] = set()
        written = {}
        for number, count, *_ in steps:
            slot = self.slots[number]
            history = histories(slot.tokens)
            for group, limits in enumerate(self.groups):
                size = limits.tokens_per_block
                for position in range(slot.computed, slot.computed + count):
                    block = slot.tables[group].get(position // size, batch.NULL_BLOCK)
                    assert block != batch.NULL_BLOCK, "a live row writes to the null block"
                    assert written.setdefault((group, block), number) == number, "two rows write to one block"
                    for step in self.in_flight:
                        users = {admission for g, b, admission in step if (g, b) == (group, block)}
                        assert users <= {slot.admission}, "a block is reused while a step in flight may touch it"
                    self.kv[group].setdefault(block, {})[position % size] = (position, history[position])
                    touched.add((group, block, slot.admission))
        self.in_flight.append(touched)

    def _read(self, steps, key, num_logprobs) -> StepResult:
        sampled, flags, chosen, prompt, pooled = [], [], [], [], []
        for number, count, is_sampled, _ in steps:
            slot = self.slots[number]
            history = histories(slot.tokens)
            end = slot.computed + count
            for position in range(slot.computed, end):
                self._attend(slot, position, history)
            wants_prompt = slot.features & batch.F_PROMPT_LOGPROBS and key.features & batch.F_PROMPT_LOGPROBS
            if wants_prompt:
                following = [*slot.tokens, 0]
                prompt += [(history[p], following[p + 1]) for p in range(slot.computed, end)]
            slot.computed = end
            assert end <= len(slot.tokens)
            if key.tail == "pool":
                assert end == len(slot.tokens), "a pooled prompt is computed whole"
                pooled.append([float(history[-1] % 1000), float(count)])
                continue
            assert is_sampled == (end == len(slot.tokens))
            if is_sampled:
                token = next_token(history[-1])
                if len(slot.tokens) < slot.min_len and token in slot.stops:
                    token = next(t for t in range(VOCAB) if t not in slot.stops)
                sampled.append(token)
                flags.append(history[-1] == -1)
                chosen.append((history[-1], token))
                slot.tokens.append(token)
        return StepResult(
            tokens=np.array(sampled, dtype=np.int32).reshape(-1, 1),
            counts=np.ones(len(sampled), dtype=np.int32),
            nonfinite=np.array(flags, dtype=bool),
            logprobs=host_logprobs(chosen, num_logprobs) if key.features & batch.F_LOGPROBS else None,
            prompt_logprobs=host_logprobs(prompt, num_logprobs) if prompt else None,
            pooled=np.array(pooled, dtype=np.float32) if key.tail == "pool" else None,
        )

    def _attend(self, slot, position, history):
        for group, limits in enumerate(self.groups):
            window = limits.spec.window
            first = 0 if window is None else max(0, position - window + 1)
            for past in range(first, position + 1):
                block = slot.tables[group].get(past // limits.tokens_per_block, batch.NULL_BLOCK)
                assert block != batch.NULL_BLOCK, "the null block is read"
                content = self.kv[group][block].get(past % limits.tokens_per_block)
                assert content == (past, history[past]), "a block holds another sequence's token"
                self.in_flight[-1].add((group, block, slot.admission))
                self.reads += 1


def sections(packed):
    header = packed[: batch.HEADER_WORDS].tolist()
    at, out = batch.HEADER_WORDS, []
    for column, width in (
        (batch.H_ADMITTED, batch.ADMIT_WORDS),
        (batch.H_TOKENS, 1),
        (batch.H_BLOCKS, 4),
        (batch.H_EXTRA, 5),
        (batch.H_SCHEDULED, 4),
    ):
        words = header[column] * width
        part = packed[at : at + words]
        out.append(part if width == 1 else part.reshape(-1, width))
        at += words
    assert at == len(packed), "the header does not describe the whole buffer"
    admits, tokens, blocks, extras, steps = out
    return header, admits, tokens, blocks, extras.tolist(), steps.tolist()


def host_logprobs(pairs, k) -> HostLogprobs:
    return HostLogprobs(
        chosen=np.array([logprob(h, t) for h, t in pairs], dtype=np.float32),
        rank=np.array([1 + t for _, t in pairs], dtype=np.int32),
        top_ids=np.array([[t + i for i in range(k)] for _, t in pairs], dtype=np.int32).reshape(len(pairs), k),
        top=np.array([[-float(i) for i in range(k)] for _ in pairs], dtype=np.float32).reshape(len(pairs), k),
    )


class Engine:
    """The loop of the engine core around a scheduler and a fake device, with everything it returned."""

    def __init__(self, limits: SchedulerLimits, groups: list[GroupLimits], depth: int, clock=lambda: 1.0) -> None:
        self.limits, self.depth = limits, depth
        self.scheduler = Scheduler(limits, groups, clock)
        self.device = FakeDevice(list(groups))
        self.steps = deque()
        self.history = []
        """All scheduled steps, as (request id, tokens, sampled) rows."""
        self.tokens: dict[str, list[int]] = {}
        self.last: dict[str, object] = {}
        self.updates = []

    def add(self, name, prompt, *, max_tokens=4, pooling=False, salt="", priority=0, stop=(), bad_words=(), **params):
        self.scheduler.add(
            EngineRequest(
                request_id=name,
                prompt_token_ids=list(prompt),
                arrival_time=0.0,
                params=None if pooling else SamplingParams(temperature=0.0, max_tokens=max_tokens, **params),
                pooling=PoolingParams() if pooling else None,
                salt=salt,
                priority=priority,
                max_tokens=max_tokens,
                stop_token_ids=list(stop),
                bad_words=list(bad_words),
            )
        )
        self.tokens[name] = []

    def launch(self) -> bool:
        """Schedule and launch one step; whether there was one."""
        step = self.scheduler.schedule()
        if step is None:
            return False
        rows = [(request.request_id, count, sampled) for request, count, sampled in step.rows]
        assert step.num_tokens == sum(count for _, count, _ in rows) <= self.limits.max_num_batched_tokens
        assert step.num_rows == len(rows) <= self.limits.max_num_seqs
        assert step.num_sampled == sum(bool(sampled) for *_, sampled in rows)
        self.history.append(rows)
        self.steps.append((step, self.device.run(step.delta.packed, step.key, step.delta.num_logprobs)))
        return True

    def read(self) -> list:
        """Read the oldest step in flight."""
        step, result = self.steps.popleft()
        updates = self.scheduler.complete(step, result)
        self.device.in_flight.popleft()
        return self.take(updates)

    def take(self, updates) -> list:
        for update in updates:
            last = self.last.get(update.request_id)
            assert last is None or last.finish_reason is None, "an update after the last one"
            self.tokens[update.request_id] += update.token_ids
            self.last[update.request_id] = update
            self.updates.append(update)
        return updates

    def step(self) -> bool:
        """Launch what can be launched, read the oldest; whether anything happened."""
        while len(self.steps) < self.depth and self.launch():
            pass
        if self.steps:
            self.read()
            return True
        return False

    def run(self, limit=5000) -> None:
        """Run to the end; a request that never finishes fails here."""
        for _ in range(limit):
            if not (self.scheduler.has_work or self.steps):
                return
            assert self.step(), "work is left and nothing can be scheduled"
        raise AssertionError("requests do not finish")

    def reason(self, name):
        return self.last[name].finish_reason

    def check_nothing_leaked(self) -> None:
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        assert self.scheduler.stats().kv_usage == 0.0
        assert self.scheduler.reset_prefix_cache()


def full_group(num_blocks, size=4, index=0) -> GroupLimits:
    spec = KVGroupSpec(index=index, kind="full", layers=(0,), num_kv_heads=1, head_size=8)
    return GroupLimits(spec=spec, tokens_per_block=size, num_blocks=num_blocks)


def window_group(num_blocks, window, size=4, index=1) -> GroupLimits:
    spec = KVGroupSpec(index=index, kind="window", layers=(1,), num_kv_heads=1, head_size=8, window=window)
    return GroupLimits(spec=spec, tokens_per_block=size, num_blocks=num_blocks)


def make_engine(*groups, depth=1, seqs=8, tokens=64, length=256, clock=lambda: 1.0, **limits) -> Engine:
    made = SchedulerLimits(max_num_seqs=seqs, max_num_batched_tokens=tokens, max_model_len=length, **limits)
    return Engine(made, list(groups), depth, clock)


@pytest.fixture(scope="session")
def fake():
    """The fake device's parts; helpers of tests cannot be imported."""
    return SimpleNamespace(
        engine=make_engine,
        full=full_group,
        window=window_group,
        expected=expected_tokens,
        histories=histories,
        next_token=next_token,
        logprob=logprob,
        sections=sections,
        random=random.Random,
        poison=POISON,
        vocab=VOCAB,
    )
