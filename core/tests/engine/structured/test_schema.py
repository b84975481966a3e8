"""A schema that a grammar cannot hold is refused, by the name of what it cannot hold."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_core.engine.structured import schema
from vllm_core.errors import RequestError

INTEGER, STRING = {"type": "integer"}, {"type": "string"}


@pytest.mark.parametrize(
    ("asked", "on"),
    [
        ({"type": "array", "items": INTEGER, "uniqueItems": True}, "json.uniqueItems"),
        ({"type": "array", "contains": INTEGER}, "json.contains"),
        ({"not": STRING}, "json.not"),
        ({"type": "object", "if": {}, "then": {}}, "json.if"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "json.dependentRequired"),
        ({"allOf": [INTEGER, {"type": "integer", "minimum": 1}]}, "json.allOf"),
        ({"anyOf": [INTEGER, STRING], "minimum": 1}, "json.minimum"),
        ({"$ref": "#/$defs/a", "minimum": 1, "$defs": {"a": INTEGER}}, "json.minimum"),
        ({"oneOf": [INTEGER, {"type": "number"}]}, "json.oneOf"),
        ({"oneOf": [{"type": "object"}, {"type": "object", "properties": {"a": INTEGER}}]}, "json.oneOf"),
        ({"type": "string", "pattern": "a+", "maxLength": 3}, "json.maxLength"),
        ({"type": "string", "format": "regex"}, "json.format"),
        ({"type": "string", "format": "date", "maxLength": 3}, "json.format"),
        ({"minLength": 3}, "json.minLength"),
        ({"type": "string", "minimum": 3}, "json.minimum"),
        ({"type": "string", "enum": ["a", 1]}, "json.enum"),
        ({"type": "integer", "const": True}, "json.enum"),
        ({"type": "object", "properties": {}, "required": ["a"]}, "json.required"),
        (
            {"type": "object", "properties": {"a": {"type": "string", "contentEncoding": "base64"}}},
            "json.properties.a.contentEncoding",
        ),
        (
            {"type": "array", "items": {"anyOf": [STRING, {"uniqueItems": True, "type": "array"}]}},
            "json.items.anyOf[1].uniqueItems",
        ),
        ({"$defs": {"a": {"not": {}}}, "type": "integer"}, "json.$defs.a.not"),
        ([], "json"),
        ({"type": "array", "items": 3}, "json.items"),
    ],
)
def test_what_cannot_be_enforced_is_named(asked: Any, on: str) -> None:
    with pytest.raises(RequestError) as caught:
        schema.check(asked)
    assert caught.value.on == on


@pytest.mark.parametrize(
    "asked",
    [
        True,
        {},
        {"type": "object", "properties": {"a": {"type": ["string", "null"], "default": None, "title": "A"}}, "required": ["a"]},
        {"properties": {"a": INTEGER}, "required": ["a"]},
        {"oneOf": [INTEGER, STRING]},
        {
            "oneOf": [{"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]} for kind in ("a", "b")],
            "discriminator": {"propertyName": "kind"},
        },
        {"allOf": [INTEGER], "description": "one"},
        {"type": "string", "enum": ["a", "b"]},
        {"type": "array", "prefixItems": [INTEGER, STRING], "items": False},
        {"type": "string", "format": "date-time"},
    ],
)
def test_what_can_be_enforced_passes(asked: Any) -> None:
    schema.check(asked)


def test_depth_is_bounded() -> None:
    asked: dict[str, Any] = INTEGER
    for _ in range(5000):
        asked = {"type": "array", "items": asked}
    with pytest.raises(RequestError, match="levels"):
        schema.check(asked)


def test_text_must_be_json() -> None:
    assert schema.read('{"type": "integer"}') == INTEGER
    with pytest.raises(RequestError):
        schema.read("{")
    with pytest.raises(RequestError):
        schema.read("[" * 100_000)
