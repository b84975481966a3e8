"""Errors have four parts, keep them over pickling-free transport, and name the nearest."""

import inspect

import pytest

from vllm_core import errors
from vllm_core.engine.wire import Failure

CLASSES = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, errors.VLLMCoreError)]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_error_shows_its_four_parts(cls: type[errors.VLLMCoreError]) -> None:
    text = str(cls("What", on="object", found="this", expected="that", fix="do so"))
    assert text.splitlines() == ["What: object", "  found:    this", "  expected: that", "  fix:      do so"]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_an_error_crosses_the_process_border_with_its_class(cls: type[errors.VLLMCoreError]) -> None:
    error = cls("What", on="object", found="this", expected="that", fix="do so")
    back = Failure.of(error, request_id="r").to_error()
    assert type(back) is cls
    assert str(back) == str(error)


def test_a_foreign_error_becomes_an_engine_error_with_its_cause() -> None:
    back = Failure.of(KeyError("x")).to_error()
    assert isinstance(back, errors.EngineError)
    assert "KeyError" in back.found


def test_the_tree_in_the_docstring_names_every_class() -> None:
    assert all(cls.__name__ in errors.__doc__ for cls in CLASSES)


def test_nearest_names_one_or_lists_all() -> None:
    assert errors.nearest("cpx", ["cpu", "toy"]) == "did you mean 'cpu'?"
    assert errors.nearest("zzz", ["cpu", "toy"]) == "use one of: cpu, toy"
    assert errors.nearest("zzz", ["cpu", "toy"], listed=True) == "use one of those"
    assert errors.nearest("--frobnicate", ["--strict"]) == "use one of: --strict", "dashes make nothing alike"
    assert errors.nearest("/v1/nothere", ["/v1/score"]) == "use one of: /v1/score"
    assert errors.nearest("/chat/completions", ["/v1/chat/completions"]) == "did you mean '/v1/chat/completions'?"
    assert errors.nearest("zzz", []) == "nothing is available"
