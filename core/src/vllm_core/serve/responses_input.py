"""From a request of ``/v1/responses`` to the messages and tools that chats have."""

from __future__ import annotations

from typing import Any

from vllm_core.sampling_params import StructuredOutputsParams
from vllm_core.serve import schema
from vllm_core.serve.conversation import Asked
from vllm_core.serve.messages import read_messages
from vllm_core.serve.schema import refused, short
from vllm_core.serve.structure import read_structure
from vllm_core.serve.tools.offered import read_tools

_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def asked_of(body: schema.ResponsesRequest) -> Asked:
    """The conversation of a request. Raises RequestError."""
    variables = dict(body.chat_template_kwargs or {})
    reasoning = body.reasoning or {}
    unknown = next((name for name in reasoning if name not in ("effort", "summary", "generate_summary")), None)
    if unknown is not None:
        raise refused(f"reasoning.{unknown[:64]}", short(reasoning[unknown]), "effort", "leave it out")
    if reasoning.get("effort") is not None:
        variables["reasoning_effort"] = reasoning["effort"]
    messages = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    return Asked(
        messages=read_messages(messages + _messages(body.input)),
        tools=read_tools(_tools(body.tools), _choice(body.tool_choice), body.parallel_tool_calls),
        structure=_structure(body.text or {}),
        variables=variables,
    )


def _structure(text: dict[str, Any]) -> StructuredOutputsParams | None:
    unknown = next((name for name in text if name not in ("format", "verbosity")), None)
    if unknown is not None or text.get("verbosity") not in (None, "medium"):
        raise refused("text", short(text), "format", "leave the other fields out")
    form = text.get("format")
    if form is None:
        return None
    if not isinstance(form, dict):
        raise refused("text.format", short(form), "an object with type", "send an object")
    return read_structure({**form, "json_schema": form} if form.get("type") == "json_schema" else form, None)


def _tools(value: object) -> object:
    """Tools in the form that chats have; wrong ones are left for `read_tools` to name."""
    if not isinstance(value, list):
        return value
    found = []
    for one in value:
        if isinstance(one, dict) and one.get("type") == "function":
            inner = {name: sent for name, sent in one.items() if name != "type"}
            one = {"type": "function", "function": inner}
        found.append(one)
    return found


def _choice(value: object) -> object:
    if isinstance(value, dict) and value.get("type") == "function":
        return {"type": "function", "function": {"name": value.get("name")}}
    return value


def _messages(value: object) -> list[dict[str, Any]]:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise refused("input", short(value), "a text or a list of items", "send one of these")
    messages: list[dict[str, Any]] = []
    reasoning = ""
    for index, item in enumerate(value):
        at = f"input[{index}]"
        if not isinstance(item, dict):
            raise refused(at, short(item), "an object", "send items as the API has them")
        kind = item.get("type", "message")
        if kind == "reasoning":
            reasoning += _text(f"{at}.content", item.get("content") or item.get("summary") or [])
            continue
        _add(messages, kind, at, item)
        if reasoning and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"], reasoning = reasoning, ""
    return messages


def _add(messages: list[dict[str, Any]], kind: object, at: str, item: dict[str, Any]) -> None:
    if kind == "message":
        messages.append({"role": item.get("role"), "content": _text(f"{at}.content", item.get("content"))})
    elif kind == "function_call":
        # Calls of one turn belong to one message.
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": None})
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        output = _text(f"{at}.output", item.get("output"))
        messages.append({"role": "tool", "content": output, "tool_call_id": item.get("call_id") or ""})
    else:
        expected = "message, function_call, function_call_output or reasoning"
        raise refused(f"{at}.type", short(kind), expected, "send items of these types")


def _text(at: str, value: object) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise refused(at, short(value), "a text or a list of text parts", "send text")
    for index, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") not in _TEXTS or not isinstance(part.get("text"), str):
            raise refused(f"{at}[{index}]", short(part), "a text part", "send text parts alone")
    return "\n".join(part["text"] for part in value)
