"""Grammars compiled with xgrammar, over a vocabulary of bytes."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from vllm_core.engine.structured import grammars
from vllm_core.engine.structured.grammars import Grammars, Vocabulary
from vllm_core.errors import RequestError
from vllm_core.sampling_params import StructuredOutputsParams

pytest.importorskip("xgrammar")

BYTES = [bytes([value]) for value in range(256)]
STOP, SIZE = 256, 300


@pytest.fixture(scope="module")
def made() -> Grammars:
    return Grammars(lambda: Vocabulary([*BYTES, b"</s>"], SIZE, (STOP,)))


def follows(made: Grammars, text: str, **wanted: Any) -> bool:
    """Whether the grammar allows the whole text, token by token, and the stop token after it."""
    constraint = made.constraint(StructuredOutputsParams(**wanted))
    for token in (*text.encode(), STOP):
        mask = constraint.mask()
        if mask is None or not mask[token // 32] >> (token % 32) & 1:
            return False
        assert len(mask) == -(-SIZE // 32)
        assert constraint.accept(token)
    return constraint.ended


@pytest.mark.parametrize(
    ("wanted", "good", "bad"),
    [
        ({"json": {"type": "integer", "minimum": 0, "maximum": 9}}, "7", "12"),
        ({"json": '{"enum": ["a", null]}'}, "null", '"b"'),
        ({"json": {"type": "array", "items": {"type": "null"}}}, "[ \n null,null]", "[" + " " * 20 + "]"),
        ({"json": {"type": "array", "items": {"type": "null"}}, "disable_any_whitespace": True}, "[null, null]", "[ null]"),
        ({"json_object": True}, '{"a": [1, {"b": "c"}]}', "[1]"),
        ({"regex": "[a-c]{2,3}"}, "abc", "abcd"),
        ({"choice": ['a"b', "ü😀", "ab"]}, "ü😀", "a"),
        ({"choice": ['a"b', "ü😀", "ab"]}, 'a"b', "ü"),
        ({"grammar": 'root ::= "x" root | "y"'}, "xxy", "xx"),
        ({"structural_tag": {"type": "structural_tag", "format": {"type": "const_string", "value": "hi"}}}, "hi", "ho"),
        ({"choice": ["yes"], "after": "</think>"}, "Hm <b>.</think>\n\nyes", "yes"),
    ],
)
def test_each_form_lets_through_what_it_means(made: Grammars, wanted: dict[str, Any], good: str, bad: str) -> None:
    assert follows(made, good, **wanted)
    assert not follows(made, bad, **wanted)


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        ({"regex": "(a"}, "parenthesis"),
        ({"grammar": "root ::= other"}, "other"),
        ({"grammar": 'first ::= "a"'}, "root"),
        ({"json": "{"}, ""),
        ({"json": {"type": "objekt"}}, "objekt"),
        ({"json": {"$ref": "#/$defs/none"}}, "none"),
        ({"json": {"type": "string", "minLength": 3, "maxLength": 2}}, "minLength"),
        ({"structural_tag": {}}, "format"),
    ],
)
def test_a_wrong_grammar_is_the_requests_error_and_says_why(made: Grammars, wanted: dict[str, Any], text: str) -> None:
    for _ in range(2):  # a failure is not kept for the next one
        with pytest.raises(RequestError) as caught:
            made.constraint(StructuredOutputsParams(**wanted))
        assert text in str(caught.value)
        assert ".cc" not in str(caught.value)


def test_equal_grammars_are_compiled_once(made: Grammars) -> None:
    wanted = {"json": {"type": "array", "items": {"type": "boolean"}}}
    first = made.compile(StructuredOutputsParams(**wanted))
    assert made.compile(StructuredOutputsParams(**wanted)) is first


def test_the_cache_forgets_what_was_not_used_for_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "MAX_CACHE_BYTES", 1)
    made = Grammars(lambda: Vocabulary([*BYTES, b"</s>"], SIZE, (STOP,)))
    first = made.compile(StructuredOutputsParams(regex="a"))
    first.result(60)
    made.compile(StructuredOutputsParams(regex="b")).result(60)
    assert follows(made, "a", regex="a"), "it is compiled again"
    assert made.compile(StructuredOutputsParams(regex="a")) is not first


def test_one_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def never() -> Vocabulary:
        gate.wait(30)
        return Vocabulary([*BYTES], 256, ())

    gate = threading.Event()
    monkeypatch.setattr(grammars, "MAX_COMPILE_S", 0.05)
    made = Grammars(never)
    with pytest.raises(RequestError, match="compiles for more"):
        made.constraint(StructuredOutputsParams(regex="a"))
    gate.set()
    made.compile(StructuredOutputsParams(regex="a")).result(60)


def test_what_nobody_waits_for_any_more_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a few grammars that take minutes would keep those of everybody else waiting long after they were refused."""
    gate, begun = threading.Event(), threading.Event()

    def slow() -> Vocabulary:
        begun.set()
        gate.wait(30)
        return Vocabulary([*BYTES], 256, ())

    monkeypatch.setattr(grammars, "_COMPILING", 1)
    made = Grammars(slow)
    first = made.compile(StructuredOutputsParams(regex="a"))
    assert begun.wait(30)
    monkeypatch.setattr(grammars, "MAX_COMPILE_S", 0.0)
    late = made.compile(StructuredOutputsParams(regex="b"))
    time.sleep(0.01)
    gate.set()
    with pytest.raises(RequestError, match="compiles for more"):
        late.result(60)
    monkeypatch.undo()
    assert first.result(60) is not None
    assert made.compile(StructuredOutputsParams(regex="b")).result(60) is not None, "asked for again, it is compiled"


def test_without_stop_tokens_the_end_of_the_grammar_is_the_end() -> None:
    made = Grammars(lambda: Vocabulary(BYTES, 256, ()))
    constraint = made.constraint(StructuredOutputsParams(choice=["ab"]))
    assert constraint.accept(ord("a"))
    assert not constraint.ended
    assert constraint.accept(ord("b"))
    assert constraint.ended


def test_special_tokens_are_never_allowed() -> None:
    made = Grammars(lambda: Vocabulary([*BYTES, b"", b"</s>"], 258, (257,)))
    mask = made.constraint(StructuredOutputsParams(json={"type": "string"})).mask()
    assert mask is not None
    assert not mask[256 // 32] >> (256 % 32) & 1
