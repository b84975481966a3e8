"""The engine's thread and grammars: it never waits for one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from vllm_core.engine import wire
from vllm_core.engine.core import EngineCore
from vllm_core.engine.scheduler import Scheduler, SchedulerLimits
from vllm_core.engine.structured.grammars import Grammars, Vocabulary
from vllm_core.engine_main import Service
from vllm_core.errors import RequestError
from vllm_core.sampling_params import StructuredOutputsParams

pytest.importorskip("xgrammar")


class Counted(Grammars):
    """Grammars over bytes that count how often one is compiled."""

    compiled = 0

    def _compile(self, wanted: StructuredOutputsParams) -> Any:
        self.compiled += 1
        return super()._compile(wanted)


class Unwatched:
    """A pulse that nobody feels."""

    def begin(self) -> None: ...
    def rest(self) -> None: ...


@pytest.fixture
def served() -> Iterator[tuple[Service, Counted, Any]]:
    """A service without a model, its grammars, and what its owner reads."""
    context = zmq.Context()
    inbox, outbox, owner = (context.socket(zmq.PAIR) for _ in range(3))
    owner.bind("inproc://owner")
    outbox.connect("inproc://owner")
    grammars = Counted(lambda: Vocabulary([bytes([value]) for value in range(256)], 256, ()))
    limits = SchedulerLimits(max_num_seqs=2, max_num_batched_tokens=8, max_model_len=32)
    core: Any = EngineCore(Scheduler(limits, ()), None, None, grammars=grammars)  # type: ignore[arg-type]
    yield Service(core, inbox, outbox, Unwatched()), grammars, owner  # type: ignore[arg-type]
    context.destroy(linger=0)


def ask(service: Service, fake: Any, regex: str) -> None:
    """Hand a constrained request over, and wait until its grammar is there, or is known not to come."""
    request = fake.request("one", 3)
    params = request.params.replace(structured_outputs=StructuredOutputsParams(regex=regex))
    service._handle(wire.ADD, wire.encode(msgspec.structs.replace(request, params=params)))
    ((_, grammar),) = service._compiling.values()
    grammar.exception(60)


def test_a_grammar_that_failed_is_not_compiled_again_while_everybody_waits(served: Any, fake: Any) -> None:
    service, grammars, owner = served
    ask(service, fake, "(")
    service._add_compiled()
    kind, payload = owner.recv_multipart()
    assert kind == wire.REFUSED
    assert isinstance(msgspec.msgpack.decode(payload, type=wire.Failure).to_error(), RequestError)
    assert grammars.compiled == 1
    assert not service._core.scheduler.has_work


def test_a_grammar_that_is_there_is_taken_though_the_cache_has_dropped_it(served: Any, fake: Any) -> None:
    service, grammars, _ = served
    ask(service, fake, "a")
    grammars._known.clear()
    service._add_compiled()
    assert grammars.compiled == 1
    assert service._core.scheduler.has_work
