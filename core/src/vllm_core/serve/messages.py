"""Chat messages of a request, as chat templates take them: text, tool calls and their results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_core.serve.body import decode
from vllm_core.serve.schema import refused, short

MAX_MESSAGES = 10_000

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""OpenAI renamed `system` to `developer`; templates know the older name."""

_NOT_HERE = ("function_call", "audio", "refusal")
_REASONING = ("reasoning_content", "reasoning")


def read_messages(value: object) -> list[dict[str, Any]]:
    """Check ``messages``; parts of one message are joined by line breaks. Raises RequestError."""
    if not isinstance(value, list):
        raise refused("messages", short(value), "a list of messages", "send a list")
    if len(value) > MAX_MESSAGES:
        raise refused("messages", f"{len(value)} messages", f"at most {MAX_MESSAGES}", "send fewer messages")
    return [_message(f"messages[{index}]", message) for index, message in enumerate(value)]


def _message(at: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise refused(at, short(value), "an object with role and content", "send such objects")
    role = value.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise refused(f"{at}.role", short(role), f"one of: {', '.join(_ROLES)}", "send a role of this list")
    message: dict[str, Any] = {"role": _ROLES[role]}
    calls = value.get("tool_calls") if role == "assistant" else None
    if calls:
        message["tool_calls"] = _calls(f"{at}.tool_calls", calls)
    content = value.get("content")
    message["content"] = "" if content is None and calls else _text(f"{at}.content", content)
    for name, sent in value.items():
        if name in ("role", "content") or (name == "tool_calls" and role == "assistant"):
            continue
        _add(message, role, f"{at}.{name[:64]}", name, sent)
    return message


def _add(message: dict[str, Any], role: str, at: str, name: str, sent: object) -> None:
    """Take one of the rarer fields of a message."""
    if name in _REASONING and role == "assistant" and (sent is None or isinstance(sent, str)):
        if sent:
            message["reasoning_content"] = sent
    elif isinstance(sent, str) and (name == "name" or (name == "tool_call_id" and role == "tool")):
        message[name] = sent
    elif sent or name not in (*_NOT_HERE, "tool_calls", "tool_call_id", "annotations", *_REASONING):
        raise refused(at, short(sent), "role, content, name and what belongs to tools", f"leave {name[:64]!r} out")


def _calls(at: str, value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise refused(at, short(value), "a list of calls", "send the calls as they came")
    return [_call(f"{at}[{index}]", call) for index, call in enumerate(value)]


def _call(at: str, value: object) -> dict[str, Any]:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise refused(at, short(value), "an object with id, type and function", "send the calls as they came")
    call_id, kind = value.get("id"), value.get("type", "function")
    if kind != "function" or not (call_id is None or isinstance(call_id, str)):
        raise refused(at, short(value), 'type "function", and a text as id', "send the calls as they came")
    arguments = read_arguments(f"{at}.function.arguments", function.get("arguments"))
    return {"id": call_id or "", "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def read_arguments(at: str, value: object) -> dict[str, Any]:
    """Arguments of a call, which travel as JSON text and which templates take as an object. Raises RequestError."""
    found = value
    if value is None or value == "":
        return {}
    if isinstance(value, str):
        found = decode(value.encode(errors="surrogatepass"))
    if not isinstance(found, Mapping):
        raise refused(at, short(value), "a JSON object, as text", "send the arguments as they came")
    return dict(found)


def _text(at: str, value: object) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise refused(at, short(value), "a string or a list of text parts", "send text")
    return "\n".join(_part(f"{at}[{index}]", part) for index, part in enumerate(value))


def _part(at: str, value: object) -> str:
    if isinstance(value, dict) and value.get("type") == "text" and isinstance(value.get("text"), str) and len(value) == 2:
        return str(value["text"])
    raise refused(at, short(value), '{"type": "text", "text": "..."}', "send text parts alone")
