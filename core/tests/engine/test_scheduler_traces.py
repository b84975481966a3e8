"""Random traces against a device that executes the packed steps and checks every read."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from vllm_core.errors import RequestError

SETTINGS = settings(max_examples=3000, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@dataclass
class Add:
    prompt: list[int]
    max_tokens: int
    stops: tuple[int, ...]
    min_tokens: int
    priority: int
    salt: str


@st.composite
def prompts(draw):
    """Prompts that often share their beginning, so that the prefix cache is used."""
    stem = draw(st.sampled_from([[], [1] * 9, [1] * 9 + [2] * 8, [3, 4, 5, 6]]))
    return (stem + draw(st.lists(st.integers(0, 4), max_size=14))) or [1]


ADDS = st.builds(
    Add,
    prompts(),
    st.integers(1, 12),
    st.sampled_from([(), (0,), (1, 2, 3)]),
    st.integers(0, 1),
    st.integers(0, 2),
    st.sampled_from(["", "tenant"]),
)
ACTIONS = st.lists(st.one_of(ADDS, ADDS, ADDS, st.just("step"), st.just("step"), st.integers(0, 9)), min_size=8, max_size=40)
CONFIGS = st.fixed_dictionaries(
    {
        "seqs": st.integers(1, 5),
        "tokens": st.sampled_from([1, 3, 7, 40]),
        "length": st.sampled_from([24, 48]),
        "depth": st.integers(1, 3),
        "policy": st.sampled_from(["fcfs", "priority"]),
        "prefix_caching": st.booleans(),
        "chunked_prefill": st.booleans(),
        "long_prefill_token_threshold": st.sampled_from([0, 2, 5]),
    }
)
GROUPS = st.tuples(
    st.sampled_from(["full", "full+window", "full+2 windows", "window", "none"]),
    st.sampled_from([1, 2, 4]),
    st.integers(0, 9),
    st.integers(1, 9),
)


def build(fake, config, layout):
    """An engine whose pools hold the longest sequence and ``spare`` blocks more, so that requests fight for them."""
    kind, size, spare, window = layout

    def full():
        return fake.full(-(-config["length"] // size) + 1 + spare, size)

    def windowed(window, index):
        needed = min(config["length"], window + config["tokens"] + size)
        return fake.window(-(-needed // size) + 1 + spare // 2, window, size, index)

    groups = {
        "full": lambda: [full()],
        "full+window": lambda: [full(), windowed(window, 1)],
        "full+2 windows": lambda: [full(), windowed(window, 1), windowed(2 * window, 2)],
        "window": lambda: [windowed(window, 0)],
        "none": lambda: [],
    }
    return fake.engine(*groups[kind](), **config)


def play(engine, actions):
    """Perform the trace and run to the end; returns the accepted requests and the aborted names."""
    accepted: dict[str, Add] = {}
    aborted: set[str] = set()
    for number, action in enumerate(actions):
        if action == "step":
            engine.step()
        elif isinstance(action, int):
            names = [
                name for name in list(accepted)[action : action + 2] if engine.last.get(name) is None or not engine.reason(name)
            ]
            aborted.update(names)
            engine.take(engine.scheduler.abort([*names, "unknown"]))
        else:
            try:
                engine.add(
                    f"r{number}",
                    action.prompt,
                    max_tokens=action.max_tokens,
                    stop=action.stops,
                    min_tokens=min(action.min_tokens, action.max_tokens),
                    priority=action.priority,
                    salt=action.salt,
                )
                accepted[f"r{number}"] = action
            except RequestError:
                event("refused at add")
    engine.run()
    return accepted, aborted


@pytest.mark.timeout(240)
@SETTINGS
@given(config=CONFIGS, layout=GROUPS, actions=ACTIONS)
def test_any_trace_gives_each_request_the_tokens_it_has_alone(fake, config, layout, actions):
    engine = build(fake, config, layout)
    accepted, aborted = play(engine, actions)
    for name, add in accepted.items():
        alone = fake.expected(
            add.prompt, add.max_tokens, add.stops, min(add.min_tokens, add.max_tokens), engine.limits.max_model_len
        )
        if name in aborted:
            assert engine.reason(name) == "abort"
            assert engine.tokens[name] == alone[: len(engine.tokens[name])]
            continue
        assert engine.tokens[name] == alone
        stopped = alone[-1] in add.stops and len(alone) > min(add.min_tokens, add.max_tokens)
        assert engine.reason(name) == ("stop" if stopped else "length")
    if engine.scheduler.stats().preemptions:
        event("preempted")
    if engine.scheduler.stats().prefix_hits:
        event("prefix hit")
    engine.check_nothing_leaked()
