"""An engine that gives its memory back: requests that ran are computed again, and a program that cannot sleep says so."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllm_core.api import StepProgram
from vllm_core.engine.core import EngineCore
from vllm_core.errors import MemoryBudgetError, UnsupportedError


def test_requests_sent_back_to_the_queue_bring_the_same_tokens(fake):
    engine = fake.engine([fake.group()])
    requests = [fake.request(name, 5 + index, max_tokens=8) for index, name in enumerate("abc")]
    engine.add(*requests)
    for _ in range(3):
        engine.step()
    while engine.in_flight:
        engine.read()
    assert engine.scheduler.stats().running == 3
    engine.scheduler.preempt_all()
    assert engine.scheduler.reset_prefix_cache(), "no block is in use"
    stats = engine.scheduler.stats()
    assert (stats.running, stats.waiting, stats.kv_usage) == (0, 3, 0.0)
    engine.run()
    assert engine.tokens == {request.request_id: fake.expected(request, engine.limits.max_model_len)[0] for request in requests}


def test_a_program_that_keeps_its_memory_refuses_to_sleep():
    class Program(StepProgram):
        def load(self, weights):
            """Nothing."""

        def prepare(self, key):
            """Nothing."""

        def run(self, executable, delta):
            """Nothing."""

    for refused in (Program().check_sleep, Program().sleep, Program().wake_up):
        with pytest.raises(UnsupportedError, match="Engine cannot sleep"):
            refused()


class _CannotSleep(StepProgram):
    """Runs steps on the fake device; the host has no memory for its weights."""

    def __init__(self, engine) -> None:
        self.device, self.steps = engine.device, []
        schedule = engine.scheduler.schedule

        def remember():
            self.steps.append(schedule())
            return self.steps[-1]

        engine.scheduler.schedule = remember

    def load(self, weights):
        """Nothing."""

    def prepare(self, key):
        return key

    def run(self, key, delta):
        result = self.device.run(self.steps[-1])
        return SimpleNamespace(ready=lambda: True, result=lambda: result)

    def check_sleep(self):
        """It can in principle."""

    def sleep(self):
        raise MemoryBudgetError("No room", on="pool", found="0", expected="1", fix="more memory")


@pytest.mark.parametrize("max_tokens", [2, 8])
def test_tokens_that_were_read_for_a_sleep_that_fails_are_not_lost(fake, max_tokens):
    engine = fake.engine([fake.group()], depth=2)
    core = EngineCore(engine.scheduler, _CannotSleep(engine), SimpleNamespace(culprit=lambda trace: None), depth=2)
    request = fake.request("a", 5, max_tokens=max_tokens)
    core.add(request)
    updates = core.step()
    with pytest.raises(MemoryBudgetError, match="No room"):
        core.sleep()
    assert core.has_work
    while core.has_work:
        updates += core.step()
    assert [token for update in updates for token in update.token_ids] == fake.expected(request, engine.limits.max_model_len)[0]
    assert updates[-1].finish_reason == "length"
    assert core.step() == []


def test_weights_that_find_no_room_on_the_host_leave_the_kv_cache_where_it_is():
    from vllm_core.engine.program import ComposedProgram

    class Full:
        stable_addresses = False

        def __init__(self):
            self.released = []

        def synchronize(self):
            """Nothing is queued."""

        def release(self, pool):
            self.released.append(pool)

        def offload(self, pool):
            raise MemoryBudgetError("No room", on=pool, found="0", expected="1", fix="more memory")

    program = ComposedProgram.__new__(ComposedProgram)
    program._device, program._captured = Full(), None
    with pytest.raises(MemoryBudgetError):
        program.sleep()
    assert program._device.released == []
