"""An engine that gives its memory back: requests that ran are computed again, and a program that cannot sleep says so."""

from __future__ import annotations

import pytest

from vllm_core.api import StepProgram
from vllm_core.errors import UnsupportedError


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
