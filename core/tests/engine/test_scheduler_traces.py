"""Random traces against a device that executes the packed differences and checks every position it reads.

Whatever the batching, chunks, preemption, caching and steps in flight: each request gets the tokens that it gets alone,
ends once, and leaves nothing behind.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

PREFIXES = [[1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5], [3] * 12, [6, 5, 4, 3, 2, 1, 0, 0, 1, 1, 2, 2]]


@dataclass(frozen=True)
class Setting:
    """An engine to build."""

    windows: tuple[int | None, ...]
    size: int
    spare: int
    depth: int
    options: dict


@st.composite
def engines(draw):
    budget = draw(st.integers(1, 24))
    limits = {
        "max_num_seqs": draw(st.integers(1, 4)),
        "max_num_batched_tokens": budget,
        "max_model_len": draw(st.integers(12, 32)),
        "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 1, 3, 7])),
        "chunked_prefill": draw(st.sampled_from([True, True, True, False])),
        "policy": draw(st.sampled_from(["fcfs", "priority"])),
        "prefix_caching": draw(st.booleans()),
    }
    return Setting(
        windows=draw(st.sampled_from([(None,), (None,), (None, 5), (6,), (1,), (None, 3, 9), (7, 4)])),
        size=draw(st.sampled_from([1, 2, 4])),
        spare=draw(st.integers(0, 12)),
        depth=draw(st.integers(1, 3)),
        options=limits,
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
        st.tuples(st.just("step"), st.integers(1, 4)),
    ),
    min_size=1,
    max_size=24,
)


def build(fake, setting: Setting):
    """Pools that hold one sequence of the longest kind, and a few blocks more."""
    groups, chunk = [], setting.options["max_num_batched_tokens"]
    for index, window in enumerate(setting.windows):
        longest = setting.options["max_model_len"]
        if window is not None:
            longest = min(longest, window + chunk + setting.size)
        groups.append(fake.group(1 - (-longest // setting.size) + setting.spare, setting.size, window, index))
    return fake.engine(groups, depth=setting.depth, **setting.options)


def play(engine, fake, trace) -> dict:
    """Run a trace; returns the requests by name."""
    added = {}
    for operation, value in trace:
        if operation == "add" and fits(engine.limits, value):
            request = fake.request(f"r{len(added)}", **value)
            added[request.request_id] = request
            engine.add(request)
        elif operation == "abort":
            engine.abort(f"r{value}")
        elif operation == "launch" and len(engine.in_flight) < engine.depth:
            launch(engine, added)
        elif operation == "read" and engine.in_flight:
            engine.read()
        elif operation == "step":
            for _ in range(value):
                engine.step()
    return added


def fits(limits, value) -> bool:
    length = len(value["prompt"])
    return length < limits.max_model_len and (limits.chunked_prefill or length <= limits.max_num_batched_tokens)


def launch(engine, added) -> None:
    """A step, in which nobody who waits is passed over by one that comes later."""
    had_rows = {name for step, _, _ in engine.in_flight for name in engine.names(step)}
    known = {name: len(engine.updates[name]) for name in added}
    step = engine.launch()
    if step is None:
        return
    waiting = engine.scheduler.num_waiting
    started = {name for name in engine.names(step) if not known[name] and name not in had_rows}
    live = [name for name in added if name not in engine.ends]
    by_priority = engine.limits.policy == "priority"
    order = {name: (added[name].priority if by_priority else 0, int(name[1:])) for name in live}
    untouched = {n for n in live if not any(n in engine.names(s) for s in engine.steps)}
    assert len(untouched) <= waiting
    assert all(order[late] > order[early] for late in untouched for early in started)


def most_steps(added, depth: int) -> int:
    """The first request in order is never preempted, so it advances by a token at least whenever it is read."""
    return depth * sum(len(r.prompt_token_ids) + r.max_tokens + 3 for r in added.values()) + depth


quick = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


@quick
@given(setting=engines(), trace=operations)
def test_each_request_gets_what_it_gets_alone_ends_once_and_leaves_nothing(fake, setting, trace):
    engine = build(fake, setting)
    added = play(engine, fake, trace)
    engine.run(max_steps=most_steps(added, setting.depth))
    for name, request in added.items():
        tokens, reason, stop = fake.expected(request, engine.limits.max_model_len)
        end = engine.ends[name]
        if end.finish_reason == "abort":
            assert engine.tokens[name] == tokens[: len(engine.tokens[name])]
        else:
            assert (engine.tokens[name], end.finish_reason, end.stop_reason) == (tokens, reason, stop)
            check_prompt_logprobs(engine, fake, request)
    assert sum(engine.scheduler.stats().finished.values()) == len(added)
    assert engine.scheduler.reset_prefix_cache()
    assert all(step.num_rows <= engine.limits.max_num_seqs for step in engine.steps)


def check_prompt_logprobs(engine, fake, request) -> None:
    lists = [u.prompt_logprobs for u in engine.updates[request.request_id] if u.prompt_logprobs is not None]
    if request.params.prompt_logprobs is None:
        assert lists == []
        return
    prompt = request.prompt_token_ids
    (entries,) = lists
    assert entries[0] is None
    assert [e.logprob for e in entries[1:]] == [fake.logprob(prompt[:i], prompt[i]) for i in range(1, len(prompt))]
