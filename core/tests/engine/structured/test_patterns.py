"""Texts of a constrained JSON string are JSON, whatever the schema says of their characters."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vllm_core.engine.structured import patterns
from vllm_core.engine.structured.grammars import Grammars, Vocabulary
from vllm_core.errors import RequestError
from vllm_core.sampling_params import StructuredOutputsParams

pytest.importorskip("xgrammar")

STOP = 256


@pytest.fixture(scope="module")
def made() -> Grammars:
    return Grammars(lambda: Vocabulary([*(bytes([value]) for value in range(256)), b""], 257, (STOP,)))


def follows(made: Grammars, schema: dict[str, Any], text: str) -> bool:
    constraint = made.constraint(StructuredOutputsParams(json=schema))
    return all(constraint.accept(token) for token in (*text.encode(), STOP))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string"},
        {"type": "string", "maxLength": 9},
        {"type": "string", "minLength": 1},
        {"type": "string", "pattern": "^.{1,9}$"},
        {"type": "string", "pattern": "^[^x]+$"},
        {"type": "string", "pattern": r"^[\s\S]+$"},
        {"type": "string", "pattern": r"^\w\W?\w$"},
    ],
)
def test_no_character_breaks_the_json(made: Grammars, schema: dict[str, Any]) -> None:
    allowed = 0
    for code in range(128):
        text = f'"a{chr(code)}b"'
        if follows(made, schema, text):
            json.loads(text)
            allowed += 1
    assert allowed > 20


@pytest.mark.parametrize(
    ("pattern", "value"),
    [
        ('^a"b$', 'a"b'),
        (r"^a\"b$", 'a"b'),
        (r"^a\nb$", "a\nb"),
        (r"^a\\b$", "a\\b"),
        (r"^xy\t+$", "xy\t"),
        ('^["x]+$', "xx"),
        (r"^[a\]]b$", "]b"),
    ],
)
def test_what_json_escapes_is_written_escaped(made: Grammars, pattern: str, value: str) -> None:
    schema = {"type": "string", "pattern": pattern}
    assert follows(made, schema, json.dumps(value))
    if json.dumps(value) != f'"{value}"':
        assert not follows(made, schema, f'"{value}"')


@pytest.mark.parametrize("pattern", ["a\tb", r"a\x22", r"\u005c", r"\x0a", r"a\0", r"\cJ", r"\u{22}", r"a\vb"])
def test_characters_by_number_that_json_would_escape_are_refused(made: Grammars, pattern: str) -> None:
    assert not patterns.can_be_escaped(pattern)
    with pytest.raises(RequestError, match="pattern"):
        follows(made, {"type": "string", "pattern": pattern}, "x")


def test_lengths_are_kept(made: Grammars) -> None:
    schema = {"type": "string", "minLength": 2, "maxLength": 3}
    assert [follows(made, schema, json.dumps("ü" * count, ensure_ascii=False)) for count in (1, 2, 3, 4)] == [0, 1, 1, 0]
    names = {"type": "object", "propertyNames": {"maxLength": 2}, "additionalProperties": {"type": "null"}}
    assert follows(made, names, '{"ab":null}')
    assert not follows(made, names, '{"abc":null}')


def test_half_a_surrogate_pair_is_no_character(made: Grammars) -> None:
    constraint = made.constraint(StructuredOutputsParams(json={"type": "string", "maxLength": 9}))
    assert constraint.accept(ord('"'))
    assert constraint.accept(0xED)
    assert not constraint.accept(0xA0)


def test_an_email_address_has_no_quotes(made: Grammars) -> None:
    schema = {"type": "string", "format": "email"}
    assert follows(made, schema, '"a.b@c.de"')
    assert not follows(made, schema, '""a"@b.co"')
