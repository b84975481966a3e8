"""Errors cross the border between processes whole."""

from __future__ import annotations

import msgspec
import pytest

from vllm_core import errors
from vllm_core.engine import wire
from vllm_core.engine.binding import ProviderFailedError
from vllm_core.errors import EngineError, VLLMCoreError
from vllm_core.registry.plan import Binding

PARTS = {"what": "It failed", "on": "a thing", "found": "a\nb", "expected": "ü", "fix": "repair it"}
CLASSES = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, VLLMCoreError)]


def crossed(error, **options):
    data = wire.encode(wire.Failure.of(error, **options))
    return msgspec.msgpack.decode(data, type=wire.Failure)


@pytest.mark.parametrize("cls", CLASSES)
def test_class_and_parts_arrive(cls):
    error = crossed(cls(**PARTS)).to_error()
    assert type(error) is cls
    assert {name: getattr(error, name) for name in PARTS} == PARTS


def test_other_errors_become_engine_errors_with_their_type():
    error = crossed(ZeroDivisionError("by 0")).to_error()
    assert type(error) is EngineError
    assert error.found == "ZeroDivisionError: by 0"


def test_a_failed_provider_arrives_with_its_call_site():
    binding = Binding(op="add", role="residual", provider="p", entry="m:f", kind="kernel")
    failure = crossed(ProviderFailedError.of(binding, ValueError("no")))
    assert (failure.op, failure.role) == ("add", "residual")
    assert type(failure.to_error()) is EngineError, "the owner's process has no such class"


def test_a_refused_request_arrives_with_its_id():
    assert crossed(errors.RequestError(**PARTS), request_id="a#b#0").request_id == "a#b#0"


def test_a_name_of_that_module_that_is_no_error_is_not_called():
    """`kind` comes from another process."""
    failure = wire.Failure("nearest", *PARTS.values())
    assert type(failure.to_error()) is EngineError
