"""Chat messages and sampling defaults, shared by the offline API and the server. No engine logic, no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm_core.errors import RequestError
from vllm_core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from vllm_core.loader.tokenizer import Tokenizer

_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def default_sampling(generation_config: Mapping[str, Any]) -> SamplingParams:
    """Sampling parameters that the model's own generation config asks for; ours where it is silent."""
    values = {name: generation_config[name] for name in _DEFAULTS if generation_config.get(name) is not None}
    if generation_config.get("do_sample") is False:
        values = {"temperature": 0.0}
    if isinstance(generation_config.get("max_new_tokens"), int):
        values["max_tokens"] = generation_config["max_new_tokens"]
    return SamplingParams(**values)


def render(
    tokenizer: Tokenizer | None, messages: Sequence[Mapping[str, Any]], *, chat_template: str | None = None, **options: Any
) -> str:
    """Apply the chat template to ``messages``. Raises RequestError where there is none."""
    if not messages:
        raise RequestError(
            "Conversation is empty", on="messages", found="no message", expected="at least one message", fix="send a message"
        )
    ready = [_message(f"messages[{index}]", message) for index, message in enumerate(messages)]
    if tokenizer is None or not (chat_template or tokenizer.chat_template):
        raise RequestError(
            "Model has no chat template",
            on="messages",
            found="no tokenizer" if tokenizer is None else "a tokenizer without a template",
            expected="a chat template",
            fix="give one with --chat-template, or send a plain prompt",
        )
    return tokenizer.apply_chat_template(ready, chat_template=chat_template, **options)


def _message(name: str, message: object) -> Mapping[str, Any]:
    """A template renders what is not there as nothing, and the model would answer that. Text parts become one text."""
    if not isinstance(message, Mapping):
        found = type(message).__name__
    elif not isinstance(message.get("role"), str):
        found = f"role {message.get('role')!r}"
    elif message.get("content") is None and not message.get("tool_calls"):
        found = "no content"
    elif not isinstance(message.get("content"), list):
        return message
    else:
        return {
            **message,
            "content": "\n".join(_part(f"{name}.content[{at}]", one) for at, one in enumerate(message["content"])),
        }
    raise RequestError(
        "Message cannot be used",
        on=name,
        found=found,
        expected="a mapping with role and content",
        fix='send messages like {"role": "user", "content": "..."}',
    )


def _part(name: str, part: object) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise RequestError(
        "Message cannot be used",
        on=name,
        found=f"{part!r:.80}",
        expected='text parts: {"type": "text", "text": "..."}',
        fix="send text alone: models here read nothing else",
    )
