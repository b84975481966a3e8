"""From a request of ``/v1/messages`` to the messages and tools that chats have."""

from __future__ import annotations

import json
from typing import Any

from vllm_core.serve import schema
from vllm_core.serve.conversation import Asked
from vllm_core.serve.messages import read_messages
from vllm_core.serve.schema import refused, short
from vllm_core.serve.tools.offered import read_tools

_MARKS = ("cache_control", "citations")
"""Hints about caching and sources, which ask nothing of an answer."""


def asked_of(body: schema.MessagesRequest | schema.CountRequest) -> Asked:
    """The conversation of a request. Raises RequestError."""
    choice, parallel = _choice(body.tool_choice)
    variables: dict[str, Any] = {}
    if body.thinking is not None:
        kind = body.thinking.get("type")
        if kind not in ("enabled", "disabled", "adaptive"):
            raise refused("thinking.type", short(kind), "enabled or disabled", "send a type of this list")
        variables["enable_thinking"] = kind != "disabled"
    system = [] if body.system is None else [{"role": "system", "content": _text("system", body.system)}]
    return Asked(
        messages=read_messages(system + _messages(body.messages)),
        tools=read_tools(_tools(body.tools), choice, parallel),
        variables=variables,
    )


def _choice(value: dict[str, Any] | None) -> tuple[object, bool]:
    if value is None:
        return None, True
    kind, parallel = value.get("type"), not value.get("disable_parallel_tool_use", False)
    if kind == "tool":
        return {"type": "function", "function": {"name": value.get("name")}}, parallel
    names = {"auto": "auto", "any": "required", "none": "none"}
    if not isinstance(kind, str) or kind not in names:
        raise refused("tool_choice.type", short(kind), "auto, any, tool or none", "send a type of this list")
    return names[kind], parallel


def _tools(value: object) -> object:
    """Tools in the form that chats have; wrong ones are left for `read_tools` to name."""
    if not isinstance(value, list):
        return value
    found: list[object] = []
    for one in value:
        if isinstance(one, dict) and one.get("type") in (None, "custom"):
            names = {"name": "name", "description": "description", "input_schema": "parameters"}
            inner = {names.get(key, key): sent for key, sent in one.items() if key not in ("type", *_MARKS)}
            found.append({"type": "function", "function": inner})
        else:
            found.append(one)
    return found


def _messages(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise refused("messages", short(value), "a list of messages", "send a list")
    messages: list[Any] = []
    for index, message in enumerate(value):
        at = f"messages[{index}]"
        if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
            raise refused(at, short(message), "an object with role user or assistant, and content", "send such objects")
        content = message.get("content")
        if isinstance(content, list):
            messages += _blocks(f"{at}.content", message["role"], content)
        else:
            messages.append({"role": message["role"], "content": content})
    return messages


def _blocks(at: str, role: str, blocks: list[Any]) -> list[dict[str, Any]]:
    """One message of blocks: results of tools are messages of their own, which come first."""
    texts: list[str] = []
    thoughts: list[str] = []
    made: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        here = f"{at}[{index}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text" and isinstance(block.get("text"), str):
            texts.append(block["text"])
        elif kind == "thinking" and role == "assistant":
            thoughts.append(str(block.get("thinking", "")))
        elif kind == "tool_use" and role == "assistant":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input"))}
            made.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            content = block.get("content")
            text = "" if content is None else _text(f"{here}.content", content)
            results.append({"role": "tool", "content": text, "tool_call_id": str(block.get("tool_use_id", ""))})
        else:
            expected = "text" if role != "assistant" else "text, thinking or tool_use"
            raise refused(here, short(block), f"a block of {expected}", "send blocks of these types")
    message: dict[str, Any] = {"role": role, "content": "\n".join(texts)}
    if made:
        message["tool_calls"] = made
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return [*results, message] if texts or made or not results else results


def _text(at: str, value: object) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise refused(at, short(value), "a text or a list of text blocks", "send text")
    for index, block in enumerate(value):
        if not isinstance(block, dict) or block.get("type") != "text" or not isinstance(block.get("text"), str):
            raise refused(f"{at}[{index}]", short(block), "a text block", "send text blocks alone")
    return "\n".join(block["text"] for block in value)
