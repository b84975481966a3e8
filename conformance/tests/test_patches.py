"""Every way of patching is counted once, and what packages do to themselves in normal use is not."""

from __future__ import annotations

import importlib
import types

import pytest

from vllm_conformance.patches import Change, snapshot


@pytest.fixture
def before(stand_ins):
    return snapshot("stand_core", ("stand_other",))


def found(before, **options):
    return [str(change) for change in before.changes(**options)]


def test_nothing_changed_counts_zero(before):
    assert len(before) > 10
    assert found(before) == []


def test_normal_use_counts_zero(before, stand_ins):
    core, other = stand_ins
    core.run(1)
    core.wrapped(1)
    core.remembered(1)
    core.shared.step()
    core._cache["key"] = 3
    core.Engine.made().size  # noqa: B018
    importlib.import_module("stand_other.extra")
    other._private = 2
    assert found(before) == []


def test_a_replaced_function_is_found(before, stand_ins):
    stand_ins[0].run = lambda value: value
    assert found(before) == ["stand_core.run: replaced"]


def test_a_replaced_method_is_found(before, stand_ins):
    stand_ins[0].Engine.step = lambda self: 0
    assert found(before) == ["stand_core.engine.Engine.step: replaced"]


def test_a_replaced_method_of_an_inner_class_is_found(before, stand_ins):
    stand_ins[0].Engine.Inner.deep = lambda self: 0
    assert found(before) == ["stand_core.engine.Engine.Inner.deep: replaced"]


@pytest.mark.parametrize("name", ["step", "fixed", "made", "size"])
def test_swapped_code_is_found_behind_every_descriptor(before, stand_ins, name):
    attribute = vars(stand_ins[0].Engine)[name]
    function = getattr(attribute, "__func__", None) or getattr(attribute, "fget", None) or attribute
    function.__code__ = (lambda *args: 0).__code__
    assert found(before) == [f"stand_core.engine.Engine.{name}: code"]


@pytest.mark.parametrize("name", ["wrapped", "remembered"])
def test_swapped_code_is_found_behind_a_wrapper(before, stand_ins, name):
    getattr(stand_ins[0], name).__wrapped__.__code__ = (lambda value: 0).__code__
    assert found(before) == [f"stand_core.{name}: code"]


def test_changed_defaults_are_found(before, stand_ins):
    stand_ins[0].run.__defaults__ = (3,)
    assert found(before) == ["stand_core.run: defaults"]


def test_changed_keyword_defaults_are_found(before, stand_ins):
    stand_ins[0].run.__kwdefaults__["shift"] = 9
    assert found(before) == ["stand_core.run: defaults"]


def test_a_function_put_into_a_closure_is_found(before, stand_ins):
    wrapper = stand_ins[0].wrapped
    cell = next(cell for cell in wrapper.__closure__ if callable(cell.cell_contents))
    cell.cell_contents = lambda value: 0
    assert found(before) == ["stand_core.wrapped: closure"]


def test_an_added_class_attribute_is_found(before, stand_ins):
    stand_ins[0].Engine.extra = 1
    assert found(before) == ["stand_core.engine.Engine.extra: added"]


def test_a_removed_name_is_found(before, stand_ins):
    del stand_ins[0].run
    assert found(before) == ["stand_core.run: removed"]


def test_a_changed_constant_is_found(before, stand_ins):
    stand_ins[0].LIMIT = 8
    assert found(before) == ["stand_core.LIMIT: replaced"]


def test_a_module_that_was_not_loaded_before_is_compared(before):
    importlib.import_module("stand_core.late").late = print
    assert found(before) == ["stand_core.late.late: replaced"]


def test_callables_in_containers_are_compared(before, stand_ins):
    stand_ins[0].HANDLERS["a"] = max
    stand_ins[0].HANDLERS["b"] = max
    stand_ins[0].STEPS.append(max)
    assert found(before) == [
        "stand_core.HANDLERS['a']: replaced",
        "stand_core.HANDLERS['b']: added",
        "stand_core.STEPS[1]: added",
    ]


def test_a_method_put_on_a_shared_object_is_found(before, stand_ins):
    stand_ins[0].shared.step = lambda: 0
    assert found(before) == ["stand_core.shared['step']: added"]


def test_a_foreign_function_that_is_replaced_is_found(before, stand_ins):
    stand_ins[1].relu = lambda x: x
    assert found(before) == ["stand_other.relu: replaced"]


def test_a_foreign_method_is_found(before, stand_ins):
    stand_ins[1].Tensor.add = lambda self: 2
    stand_ins[1].Tensor.new = lambda self: 2
    assert found(before) == ["stand_other.Tensor.add: replaced", "stand_other.Tensor.new: added"]


def test_the_count_names_what_to_look_for():
    assert str(Change("a.B", "c", "code")) == "a.B.c: code"


def test_torch_functions_are_compared_and_the_plugins_device_is_not(monkeypatch):
    torch = pytest.importorskip("torch")
    before = snapshot("vllm_conformance", ("torch",))
    monkeypatch.setattr(torch, "toy", types.ModuleType("toy_plugin.module"), raising=False)
    monkeypatch.setattr(torch.Tensor, "is_toy", property(lambda self: False), raising=False)
    assert found(before) == ["torch.toy: added", "torch.Tensor.is_toy: added"]
    assert found(before, device_type="toy") == []
    monkeypatch.setattr(torch, "relu", lambda x: x)
    assert found(before, device_type="toy") == ["torch.relu: replaced"]
