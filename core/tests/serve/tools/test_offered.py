"""Tools of a request, and the schema that makes a call come."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_core.engine.structured import schema
from vllm_core.errors import RequestError
from vllm_core.serve.tools.offered import read_tools

POINT = {
    "type": "object",
    "properties": {"at": {"$ref": "#/$defs/Point"}, "more": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["at"],
    "$defs": {"Point": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}},
}


def tool(name: str = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(
    ("tools", "choice", "expected"),
    [
        (None, None, "none"),
        ([], "auto", "none"),
        ([tool()], None, "auto"),
        ([tool()], "none", "none"),
        ([tool()], "required", "required"),
        ([tool(), tool("g")], named("g"), "named"),
    ],
)
def test_a_choice_follows_what_was_sent(tools: Any, choice: Any, expected: str) -> None:
    assert read_tools(tools, choice, None).choice == expected


@pytest.mark.parametrize(
    ("tools", "choice", "on"),
    [
        ({}, None, "tools"),
        ([tool()] * 300, None, "tools"),
        ([tool(), tool()], None, "tools"),
        ([1], None, "tools[0]"),
        ([{"type": "web_search"}], None, "tools[0]"),
        ([tool("a b")], None, "tools[0].function.name"),
        ([tool("")], None, "tools[0].function.name"),
        ([tool(description=3)], None, "tools[0].function.description"),
        ([tool(parameters="x")], None, "tools[0].function.parameters"),
        ([tool(color="red")], None, "tools[0].function.color"),
        (None, "required", "tool_choice"),
        ([tool()], "always", "tool_choice"),
        ([tool()], {"type": "function"}, "tool_choice.function.name"),
        ([tool()], named("g"), "tool_choice.function.name"),
        ([tool()], 1, "tool_choice"),
    ],
)
def test_wrong_tools_and_choices_are_named(tools: Any, choice: Any, on: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_tools(tools, choice, None)
    assert caught.value.on == on


def test_references_of_each_tool_stay_its_own() -> None:
    tools = read_tools([tool("a", parameters=POINT), tool("b", parameters=POINT)], "required", None)
    structure = tools.structure()
    assert structure is not None
    document = structure.json
    assert isinstance(document, dict)
    schema.check(document)
    assert set(document["$defs"]) == {"tool0", "tool0-Point", "tool1", "tool1-Point"}
    assert document["$defs"]["tool1"]["properties"]["at"] == {"$ref": "#/$defs/tool1-Point"}
    assert document["$defs"]["tool1"]["properties"]["more"]["anyOf"][0] == {"$ref": "#/$defs/tool1"}


def test_one_call_is_enforced_where_calls_may_not_be_parallel() -> None:
    structure = read_tools([tool()], "required", False).structure()
    assert structure is not None
    assert isinstance(structure.json, dict)
    assert structure.json["maxItems"] == 1
