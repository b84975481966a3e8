"""Call sites are bound to plain callables; a failure is traced back to its provider."""

import sys
from dataclasses import dataclass

import pytest

from vllm_core.engine.binding import BoundOps, ProviderFailedError
from vllm_core.errors import EngineError


@dataclass
class Bind:
    op: str
    role: str
    provider: str
    entry: str
    kind: str = "kernel"


def good(out: int, x: int, weight: int, eps: float) -> int:
    return x + 1


def short(out: int, x: int, weight: int) -> int:
    return x + 1


def bad(out: int, x: int, weight: int) -> int:
    return _inner(x)


def _inner(x: int) -> int:
    return x // 0


class NoFunction:
    def __call__(self, out: int, x: int, weight: int) -> int:
        return _inner(x)


no_function, built_in = NoFunction(), max


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> BoundOps:
    monkeypatch.setitem(sys.modules, "binding_fixture", sys.modules[__name__])
    return BoundOps(
        [
            Bind("rms_norm", "norm", "a", "binding_fixture:good"),
            Bind("linear", "linear", "b", "binding_fixture:bad", "reference"),
        ]
    )


def test_a_bound_op_is_the_callable_itself(ops: BoundOps) -> None:
    assert ops.get("rms_norm", "norm") is good


def test_an_unplanned_call_site_is_an_error_that_names_it(ops: BoundOps) -> None:
    with pytest.raises(EngineError, match="rms_norm at mlp"):
        ops.get("rms_norm", "mlp")


def test_kinds_are_counted(ops: BoundOps) -> None:
    assert ops.kinds() == {"kernel": 1, "reference": 1}


def test_the_culprit_is_found_below_core_and_above_the_providers_own_helpers(ops: BoundOps) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        ops.get("linear", "linear")(0, 1, 2)
    culprit = ops.culprit(caught.value.__traceback__)
    assert culprit is not None
    assert (culprit.op, culprit.provider) == ("linear", "b")


@pytest.mark.parametrize(("name", "error"), [("no_function", ZeroDivisionError), ("built_in", TypeError)])
def test_what_is_no_python_function_is_found_too(monkeypatch: pytest.MonkeyPatch, name: str, error: type[Exception]) -> None:
    monkeypatch.setitem(sys.modules, "binding_fixture", sys.modules[__name__])
    entry = f"binding_fixture:{name}"
    ops = BoundOps([Bind("linear", role, provider, entry) for role, provider in (("linear", "a"), ("lm_head", "b"))])
    with pytest.raises(error) as caught:
        ops.get("linear", "lm_head")(0, 1, "2")
    culprit = ops.culprit(caught.value.__traceback__)
    assert culprit is not None
    assert culprit.provider == "b"


def test_arguments_that_the_schema_does_not_have_are_the_providers_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that does not fit fails in the caller: its trace has nothing of the provider."""
    monkeypatch.setitem(sys.modules, "binding_fixture", sys.modules[__name__])
    with pytest.raises(ProviderFailedError, match="too many positional arguments") as caught:
        BoundOps([Bind("rms_norm", "norm", "a", "binding_fixture:short")])
    assert caught.value.binding is not None
    assert caught.value.binding.provider == "a"


def test_an_error_of_core_has_no_culprit(ops: BoundOps) -> None:
    with pytest.raises(EngineError) as caught:
        ops.get("rms_norm", "nowhere")
    assert ops.culprit(caught.value.__traceback__) is None


def test_a_provider_failure_says_how_to_go_on(ops: BoundOps) -> None:
    binding = Bind("linear", "linear", "b", "x:y")
    error = ProviderFailedError.of(binding, ZeroDivisionError("division by zero"))
    assert error.binding is binding
    assert "--deny-provider b" in str(error)
    assert "ZeroDivisionError: division by zero" in error.found
