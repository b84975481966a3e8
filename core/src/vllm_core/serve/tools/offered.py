"""The tools that a request offers, and what it says about their use."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from vllm_core.sampling_params import StructuredOutputsParams
from vllm_core.serve.schema import refused, short

MAX_TOOLS = 256
MAX_CALLS = 32
"""Most calls of one answer whose calls are required."""

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_CHOICES = ("none", "auto", "required")


@dataclass(frozen=True, slots=True)
class Function:
    """One tool. `parameters` is a JSON schema."""

    name: str
    description: str
    parameters: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Tools:
    """Functions, and whether the model may, must or must not call them; `named` is the one it must."""

    functions: tuple[Function, ...] = ()
    choice: Literal["none", "auto", "required", "named"] = "none"
    named: str = ""
    parallel: bool = True

    @property
    def names(self) -> frozenset[str]:
        """Their names."""
        return frozenset(one.name for one in self.functions)

    def for_template(self) -> list[dict[str, Any]] | None:
        """As chat templates take them; None where the model is not to know of them."""
        if not self.functions or self.choice == "none":
            return None
        return [
            {
                "type": "function",
                "function": {"name": one.name, "description": one.description, "parameters": one.parameters},
            }
            for one in self.functions
        ]

    def structure(self) -> StructuredOutputsParams | None:
        """What enforces a call that must come: the arguments alone, or a list of calls."""
        if self.choice == "named":
            one = next(one for one in self.functions if one.name == self.named)
            return StructuredOutputsParams(json=one.parameters)
        if self.choice != "required":
            return None
        definitions: dict[str, Any] = {}
        calls = [_call_schema(one, f"tool{index}", definitions) for index, one in enumerate(self.functions)]
        schema: dict[str, Any] = {
            "type": "array",
            "minItems": 1,
            "maxItems": MAX_CALLS if self.parallel else 1,
            "items": calls[0] if len(calls) == 1 else {"anyOf": calls},
        }
        return StructuredOutputsParams(json={**schema, "$defs": definitions})


def read_tools(tools: object, choice: object, parallel: bool | None) -> Tools:
    """Check `tools`, `tool_choice` and `parallel_tool_calls`. Raises RequestError."""
    functions = _functions(tools)
    if choice is None:
        choice = "auto" if functions else "none"
    if isinstance(choice, str) and choice in _CHOICES:
        if choice == "required" and not functions:
            raise refused("tool_choice", "required without tools", "tools", "send tools, or leave tool_choice out")
        mode: Any = choice if functions else "none"
        return Tools(functions, mode, "", parallel is not False)
    if not isinstance(choice, dict) or choice.get("type") != "function":
        expected = 'none, auto, required, or {"type": "function", "function": {"name": ...}}'
        raise refused("tool_choice", short(choice), expected, "send a choice of this list")
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if name not in [one.name for one in functions]:
        names = ", ".join(one.name for one in functions) or "tools"
        raise refused("tool_choice.function.name", short(name), f"one of: {names}", "name a tool of this request")
    return Tools(functions, "named", str(name), False)


def _functions(value: object) -> tuple[Function, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise refused("tools", short(value), "a list of tools", "send a list")
    if len(value) > MAX_TOOLS:
        raise refused("tools", f"{len(value)} tools", f"at most {MAX_TOOLS}", "send fewer tools")
    functions = tuple(_function(f"tools[{index}]", one) for index, one in enumerate(value))
    if len({one.name for one in functions}) < len(functions):
        raise refused("tools", "two tools of one name", "names of their own", "rename one")
    return functions


def _function(at: str, value: object) -> Function:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(value, dict) or value.get("type") != "function" or not isinstance(function, dict):
        raise refused(at, short(value), '{"type": "function", "function": {...}}', "send functions")
    unknown = next((name for name in function if name not in ("name", "description", "parameters", "strict")), None)
    if unknown is not None:
        raise refused(
            f"{at}.function.{unknown[:64]}", short(function[unknown]), "name, description, parameters", "leave it out"
        )
    name, text, schema = function.get("name"), function.get("description"), function.get("parameters")
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise refused(f"{at}.function.name", short(name), "1 to 64 letters, digits, _ . or -", "rename the function")
    if not (text is None or isinstance(text, str)):
        raise refused(f"{at}.function.description", short(text), "a text", "send a text")
    if not (schema is None or isinstance(schema, dict)):
        raise refused(f"{at}.function.parameters", short(schema), "a JSON schema", "send an object")
    return Function(name, text or "", schema or {"type": "object", "properties": {}})


def _call_schema(function: Function, prefix: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """An object with the function's name and arguments that follow its schema, whose references now lead to our root."""
    own = dict(function.parameters)
    for key in ("$defs", "definitions"):
        inner = own.pop(key, None)
        if isinstance(inner, dict):
            definitions.update({f"{prefix}-{name}": _moved(one, prefix) for name, one in inner.items()})
    definitions[prefix] = _moved(own, prefix)
    return {
        "type": "object",
        "properties": {"name": {"type": "string", "enum": [function.name]}, "parameters": {"$ref": f"#/$defs/{prefix}"}},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _moved(value: Any, prefix: str) -> Any:
    if isinstance(value, list):
        return [_moved(one, prefix) for one in value]
    if not isinstance(value, dict):
        return value
    moved = {name: _moved(one, prefix) for name, one in value.items()}
    reference = value.get("$ref")
    if isinstance(reference, str):
        for begin in ("#/$defs/", "#/definitions/"):
            if reference.startswith(begin):
                moved["$ref"] = f"#/$defs/{prefix}-{reference[len(begin) :]}"
        if reference == "#":
            moved["$ref"] = f"#/$defs/{prefix}"
    return moved
