"""The scheduler with grammars, without xgrammar and torch: masks wait for tokens in flight, and no row is disturbed."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_core.api import StepHandle, StepProgram, batch
from vllm_core.engine.core import EngineCore
from vllm_core.engine.structured.constraint import DEAD_END, MaskRows
from vllm_core.sampling_params import StructuredOutputsParams

WANTED = StructuredOutputsParams(regex="x")


class Alternating:
    """A grammar over few tokens: each differs from the one before, and after ``length`` the stop token comes."""

    def __init__(self, length: int, vocab: int, stop: int) -> None:
        self.length, self.vocab, self.stop = length, vocab, stop
        self.taken: list[int] = []

    @property
    def ended(self) -> bool:
        return bool(self.taken) and self.taken[-1] == self.stop

    def accept(self, token: int) -> bool:
        allowed = self._allowed()
        self.taken.append(token)
        return token in allowed

    def mask(self):
        words = np.zeros(1, dtype=np.int32)
        for token in self._allowed():
            words[0] |= 1 << token
        return words if words.any() else None

    def _allowed(self) -> set[int]:
        if len(self.taken) >= self.length:
            return {self.stop}
        return set(range(self.vocab)) - {self.stop, *self.taken[-1:]}


class DeadEnd(Alternating):
    """Allows one token, then none."""

    def _allowed(self) -> set[int]:
        return {1} if not self.taken else set()


class Grammars:
    """Gives each request the grammar that a test wants for it, in the order of the requests."""

    def __init__(self, *made) -> None:
        self.made = list(made)

    def constraint(self, wanted):
        return self.made.pop(0)


class Ops:
    def kinds(self):
        return {}

    def culprit(self, trace):
        return None


@pytest.fixture
def core(fake):
    """Makes a core on a fake device, with grammars; its program records when masks were worked out."""

    def make(depth: int, *grammars, **limits):
        engine = fake.engine([fake.group()], depth=depth, **limits)
        program = _Program(engine, fake)
        made = EngineCore(engine.scheduler, program, Ops(), depth=depth, grammars=Grammars(*grammars))
        return made, program

    return make


class _Handle:
    def __init__(self, program, result, number) -> None:
        self.program, self.value, self.number = program, result, number

    def ready(self) -> bool:
        return True

    def result(self):
        self.program.order.append(f"read {self.number}")
        return self.value


class _Program(StepProgram):
    """Runs packed steps on the fake device and applies masks to what it samples; records the order of things."""

    def __init__(self, engine, fake) -> None:
        self.device, self.vocab, self.next_token = engine.device, fake.vocab, fake.next_token
        self.masks: list[dict[int, int]] = []
        self.order: list[str] = []
        self.number = 0
        self.rows: list = []
        schedule = engine.scheduler.schedule

        def remember():
            step = schedule()
            self.rows.append(step)
            return step

        engine.scheduler.schedule = remember

    def load(self, weights) -> None:
        return

    def prepare(self, key):
        return key

    def run(self, key, delta) -> StepHandle:
        step = self.rows[-1]
        self.number += 1
        number = self.number
        self.order.append(f"forward {number}")
        allowed = {}
        if key.features & batch.F_MASK:
            allowed = {row: int(words[0]) for row, words in delta.mask_rows.items()}
            self.order.append(f"masks {number}")
        self.masks.append(allowed)
        result = self.device.run(step)
        sampled = [request for request, _, is_sampled in step.rows if is_sampled]
        for row, bits in allowed.items():
            slot = sampled[row].slot
            known = self.device.tokens[slot]
            banned = [token for token in range(self.vocab) if not bits >> token & 1]
            token = self.next_token(known[:-1], sampled[row].request.seed, banned)
            known[-1] = int(token)
            result.tokens[row, 0] = token
        return _Handle(self, result, number)


def run(core) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    ends: dict[str, tuple[str, str | None]] = {}
    for _ in range(400):
        if not core.has_work:
            break
        for update in core.step():
            tokens.setdefault(update.request_id, []).extend(update.token_ids)
            if update.finish_reason is not None:
                ends[update.request_id] = update.finish_reason, update.error
    assert not core.has_work
    core.ends = ends
    return tokens


STOP = 6


def constrained(fake, name: str, **more):
    return fake.request(name, more.pop("prompt", 5), max_tokens=20, stops=[STOP], structured_outputs=WANTED, **more)


@pytest.mark.parametrize("limits", [{}, {"max_num_batched_tokens": 6}, {"max_num_seqs": 2}])
def test_constrained_requests_follow_their_grammar_at_any_depth_and_others_go_on_as_alone(fake, core, limits) -> None:
    outcomes = []
    for depth in (1, 2):
        grammars = [Alternating(length, fake.vocab, STOP) for length in (3, 7, 1)]
        made, _ = core(depth, *grammars, **limits)
        made.add(constrained(fake, "a", seed=1))
        made.add(fake.request("plain", 9, max_tokens=12, seed=5))
        made.add(constrained(fake, "b", seed=2, prompt=11))
        made.add(constrained(fake, "c", seed=3, prompt=2))
        tokens = run(made)
        outcomes.append(tokens)
        for name, grammar in zip("abc", grammars, strict=True):
            assert tokens[name] == grammar.taken
            assert len(tokens[name]) == grammar.length + 1
            assert made.ends[name] == ("stop", None)
            assert all(one != other for one, other in zip(tokens[name], tokens[name][1:], strict=False))
        alone = fake.expected(fake.request("plain", 9, max_tokens=12, seed=5), 64)
        assert tokens["plain"] == alone[0]
    assert outcomes[0] == outcomes[1]


def test_the_step_before_is_read_between_the_forward_part_and_the_masks(fake, core) -> None:
    made, program = core(2, Alternating(4, fake.vocab, STOP))
    made.add(constrained(fake, "a"))
    run(made)
    order = program.order
    for number in range(2, 5):
        begin = order.index(f"forward {number}")
        assert order[begin : begin + 3] == [f"forward {number}", f"read {number - 1}", f"masks {number}"]


def test_steps_without_grammar_stay_two_deep(fake, core) -> None:
    made, program = core(2)
    made.add(fake.request("plain", 5, max_tokens=8))
    run(made)
    assert program.order[:3] == ["forward 1", "forward 2", "read 1"]
    assert all(not masks for masks in program.masks)


def test_a_preempted_request_comes_back_where_its_grammar_was(fake, core) -> None:
    grammars = [Alternating(14, fake.vocab, STOP), Alternating(14, fake.vocab, STOP)]
    engine = fake.engine([fake.group(num_blocks=9)], depth=2)
    program = _Program(engine, fake)
    made = EngineCore(engine.scheduler, program, Ops(), depth=2, grammars=Grammars(*grammars))
    made.add(constrained(fake, "a", seed=1))
    made.add(constrained(fake, "b", seed=2))
    tokens = run(made)
    assert engine.scheduler.stats().preemptions > 0, "the pool is too large to show it"
    assert tokens["a"] == grammars[0].taken
    assert tokens["b"] == grammars[1].taken
    assert made.ends == {"a": ("stop", None), "b": ("stop", None)}


def test_a_grammar_that_leads_nowhere_fails_its_request_alone(fake, core) -> None:
    made, _ = core(2, DeadEnd(9, fake.vocab, STOP))
    made.add(constrained(fake, "a"))
    made.add(fake.request("plain", 5, max_tokens=6))
    tokens = run(made)
    assert made.ends["a"] == ("error", DEAD_END)
    assert tokens["a"] == [1]
    assert len(tokens["plain"]) == 6


def test_a_request_that_ended_in_the_step_before_has_no_mask(fake) -> None:
    class Ended:
        finished = True
        constraint = None

    assert dict(MaskRows([(0, Ended())])) == {}
