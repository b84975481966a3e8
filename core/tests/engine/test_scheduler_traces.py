"""Random traces against a device that executes the packed differences and checks every position it reads.

Whatever the batching, chunks, preemption, caching and steps in flight: each request gets the tokens that it gets alone,
ends once, and leaves nothing behind.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_core.api import batch

PREFIXES = [[1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5], [3] * 12, [6, 5, 4, 3, 2, 1, 0, 0, 1, 1, 2, 2]]


@dataclass(frozen=True)
class Setting:
    """An engine to build. ``spare``: blocks of each group beyond what its longest sequence needs."""

    windows: tuple[int | None, ...]
    sizes: tuple[int, ...]
    spare: int
    depth: int
    limits: dict[str, Any]


@st.composite
def engines(draw):
    """Mostly small budgets and tight pools, because that is where requests get into each other's way."""
    windows = draw(st.sampled_from([(None,), (None,), (None, 5), (6,), (1,), (None, 3, 9), (7, 4)]))
    size = draw(st.sampled_from([1, 2, 4]))
    mixed = draw(st.sampled_from([False, False, False, True]))
    return Setting(
        windows=windows,
        sizes=tuple(size + (index if mixed else 0) for index in range(len(windows))),
        spare=draw(st.sampled_from([0, 0, 1, 2, 3, 12])),
        depth=draw(st.integers(1, 3)),
        limits={
            "max_num_seqs": draw(st.integers(1, 4)),
            "max_num_batched_tokens": draw(st.sampled_from([1, 2, 3, 4, 5, 6, 8, 12, 24])),
            "max_model_len": draw(st.integers(12, 32)),
            "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 1, 3, 7])),
            "chunked_prefill": draw(st.sampled_from([True, True, True, False])),
            "policy": draw(st.sampled_from(["fcfs", "priority"])),
            "prefix_caching": draw(st.booleans()),
        },
    )


@st.composite
def requests(draw):
    prefix = draw(st.sampled_from(PREFIXES))
    prompt = prefix[: draw(st.integers(0, 12))] + draw(st.lists(st.integers(0, 6), min_size=1, max_size=6))
    max_tokens = draw(st.integers(1, 10))
    return {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "min_tokens": draw(st.integers(0, max_tokens)),
        "stops": draw(st.sampled_from([(), (), (0,), (2, 5)])),
        "salt": draw(st.sampled_from(["", "", "tenant"])),
        "seed": draw(st.integers(0, 3)),
        "priority": draw(st.integers(-1, 2)),
        "logprobs": draw(st.sampled_from([None, None, 2])),
        "prompt_logprobs": draw(st.sampled_from([None, None, None, 1])),
    }


operations = st.lists(
    st.one_of(
        st.tuples(st.just("add"), requests()),
        st.tuples(st.just("add"), requests()),
        st.tuples(st.just("abort"), st.integers(0, 9)),
        st.tuples(st.just("launch"), st.none()),
        st.tuples(st.just("read"), st.none()),
        st.tuples(st.just("advance"), st.integers(1, 8)),
    ),
    min_size=1,
    max_size=24,
)


def build(fake, setting: Setting):
    """Pools that hold one sequence of the longest kind, and the spare blocks."""
    groups, chunk = [], setting.limits["max_num_batched_tokens"]
    for index, (window, size) in enumerate(zip(setting.windows, setting.sizes, strict=True)):
        longest = setting.limits["max_model_len"]
        if window is not None:
            longest = min(longest, window + chunk + size)
        groups.append(fake.group(1 - (-longest // size) + setting.spare, size, window, index))
    return fake.engine(groups, depth=setting.depth, **setting.limits)


class Trace:
    """Runs operations, and checks after each launch what must hold then."""

    def __init__(self, engine, fake) -> None:
        self.engine = engine
        self.fake = fake
        self.added: dict[str, Any] = {}
        self.entries: dict[str, Any] = {}

    def play(self, operations) -> None:
        engine = self.engine
        for operation, value in operations:
            if operation == "add" and self._fits(value):
                self._add(value)
            elif operation == "abort":
                engine.abort(f"r{value}")
            elif operation == "launch" and len(engine.in_flight) < engine.depth:
                self.launch()
            elif operation == "read" and engine.in_flight:
                engine.read()
            elif operation == "advance":
                for _ in range(value):
                    self.advance()

    def finish(self) -> None:
        """To the end, in a bounded number of moves: the first in order is never preempted, so it gets on with each read."""
        engine = self.engine
        for _ in range(most_moves(self.added, engine.depth)):
            if not engine.in_flight and not engine.scheduler.has_work:
                break
            self.advance()
        engine.run(max_steps=0)

    def advance(self) -> None:
        full = len(self.engine.in_flight) == self.engine.depth
        if (full or not self.launch()) and self.engine.in_flight:
            self.engine.read()

    def launch(self) -> bool:
        step = self.engine.launch()
        if step is None:
            return False
        rows = {request.request_id: request for request, _, _ in step.rows}
        self.entries.update(rows)
        packed = step.delta.packed
        admits = packed[batch.HEADER_WORDS :][: packed[batch.H_ADMITTED] * batch.ADMIT_WORDS]
        slots = set(admits[batch.A_SLOT :: batch.ADMIT_WORDS].tolist())
        self._nobody_is_overtaken({name for name, request in rows.items() if request.slot in slots})
        for request in rows.values():
            self._windows_are_bounded(request)
        return True

    def _nobody_is_overtaken(self, admitted: set[str]) -> None:
        by_priority = self.engine.limits.policy == "priority"
        order = {name: (one.priority if by_priority else 0, int(name[1:])) for name, one in self.added.items()}
        waiting = {name for name in self.added if name not in self.engine.ends and not self._runs(name)}
        assert all(order[early] < order[late] for early in admitted for late in waiting)

    def _runs(self, name: str) -> bool:
        entry = self.entries.get(name)
        return entry is not None and entry.slot >= 0 and not entry.leaving

    def _windows_are_bounded(self, request) -> None:
        """What steps in flight may read is kept: a chunk for each of them, beside the window."""
        chunk = self.engine.limits.max_num_batched_tokens * self.engine.depth
        for group, blocks in zip(self.engine.groups, request.blocks, strict=True):
            if group.spec.window is not None:
                held = sum(1 for block in blocks if block != batch.NULL_BLOCK)
                assert held <= 2 + (group.spec.window + chunk) // group.tokens_per_block

    def _add(self, value) -> None:
        request = self.fake.request(f"r{len(self.added)}", **value)
        self.added[request.request_id] = request
        self.engine.add(request)

    def _fits(self, value) -> bool:
        limits, length = self.engine.limits, len(value["prompt"])
        return length < limits.max_model_len and (limits.chunked_prefill or length <= limits.max_num_batched_tokens)


def most_moves(added, depth: int) -> int:
    return 2 * depth * (1 + sum(len(one.prompt_token_ids) + one.max_tokens + 3 for one in added.values()))


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(setting=engines(), operations=operations)
def test_each_request_gets_what_it_gets_alone_ends_once_and_leaves_nothing(fake, setting, operations):
    engine = build(fake, setting)
    trace = Trace(engine, fake)
    trace.play(operations)
    trace.finish()
    for name, request in trace.added.items():
        check_outcome(engine, fake, request, engine.ends[name])
    assert sum(engine.scheduler.stats().finished.values()) == len(trace.added)
    assert engine.scheduler.reset_prefix_cache()


def check_outcome(engine, fake, request, end) -> None:
    name = request.request_id
    tokens, reason, stop = fake.expected(request, engine.limits.max_model_len)
    if end.finish_reason == "abort":
        assert engine.tokens[name] == tokens[: len(engine.tokens[name])]
        return
    assert (engine.tokens[name], end.finish_reason, end.stop_reason) == (tokens, reason, stop)
    check_logprobs(engine, fake, request)


def check_logprobs(engine, fake, request) -> None:
    updates, prompt = engine.updates[request.request_id], request.prompt_token_ids
    known = list(prompt)
    for update in updates:
        assert (update.logprobs is None) == (request.params.logprobs is None)
        if update.logprobs is not None:
            assert [(e.token, e.logprob) for e in update.logprobs] == [(t, fake.logprob(known, t)) for t in update.token_ids]
        known += update.token_ids
    given = [update.prompt_logprobs for update in updates if update.prompt_logprobs is not None]
    if request.params.prompt_logprobs is None:
        assert given == []
        return
    (entries,) = given
    assert entries[0] is None
    assert [e.logprob for e in entries[1:]] == [fake.logprob(prompt[:i], prompt[i]) for i in range(1, len(prompt))]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(setting=engines(), lengths=st.lists(st.integers(1, 12), min_size=1, max_size=8), aborted=st.sets(st.integers(0, 7)))
def test_pooled_prompts_are_computed_whole_whatever_else_runs(fake, setting, lengths, aborted):
    limits = {**setting.limits, "pooling_whole_prompt": True, "prefix_caching": False, "max_num_batched_tokens": 12}
    engine = build(fake, replace(setting, limits={**limits, "max_model_len": 12}))
    engine.add(*(fake.pooling(f"r{i}", length) for i, length in enumerate(lengths)))
    engine.launch()
    engine.abort(*(f"r{i}" for i in aborted))
    engine.run(max_steps=3 * len(lengths))
    for i, length in enumerate(lengths):
        end = engine.ends[f"r{i}"]
        if end.finish_reason == "stop":
            assert end.pooled[1] == length
        else:
            assert (end.finish_reason, i in aborted) == ("abort", True)
