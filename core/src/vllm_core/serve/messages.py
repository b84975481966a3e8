"""Chat messages of a request, as chat templates take them: text only, for now."""

from __future__ import annotations

from vllm_core.serve.schema import refused, short

MAX_MESSAGES = 10_000

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""OpenAI renamed `system` to `developer`; templates know the older name."""

_NOT_HERE = ("tool_calls", "tool_call_id", "function_call", "audio", "refusal", "reasoning_content")


def read_messages(value: object) -> list[dict[str, str]]:
    """Check ``messages``; parts of one message are joined by line breaks. Raises RequestError."""
    if not isinstance(value, list):
        raise refused("messages", short(value), "a list of messages", "send a list")
    if len(value) > MAX_MESSAGES:
        raise refused("messages", f"{len(value)} messages", f"at most {MAX_MESSAGES}", "send fewer messages")
    return [_message(f"messages[{index}]", message) for index, message in enumerate(value)]


def _message(at: str, value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        raise refused(at, short(value), "an object with role and content", "send such objects")
    role = value.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise refused(f"{at}.role", short(role), f"one of: {', '.join(_ROLES)}", "send a role of this list")
    message = {"role": _ROLES[role], "content": _text(f"{at}.content", value.get("content"))}
    for name, sent in value.items():
        if name in ("role", "content") or (name in _NOT_HERE and not sent):
            continue
        if name != "name" or not isinstance(sent, str):
            raise refused(f"{at}.{name[:64]}", short(sent), "role, content and name", f"leave {name[:64]!r} out")
        message["name"] = sent
    return message


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
