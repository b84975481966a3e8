"""What an operator sets of the API: parsers, templates, structured output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from vllm_core.errors import ConfigError, nearest
from vllm_core.serve.reasoning.registry import ReasoningParser, reasoning_parser
from vllm_core.serve.tools.registry import ToolParser, tool_parser

BACKENDS = ("auto", "xgrammar")
TEMPLATE_ARGUMENTS = frozenset(
    ("self", "tokenizer", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message")
)
"""What a chat template gets from the server itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """`auto_tools` lets the model decide about calls, which `tools` finds in what it writes. `request_templates` lets requests
    bring chat templates; `template_values` reach the template where a request sends none of the name. `compact_json` writes
    JSON of structured output without free white space."""

    tools: ToolParser | None = None
    auto_tools: bool = False
    reasoning: ReasoningParser | None = None
    request_templates: bool = False
    template_values: Mapping[str, Any] = field(default_factory=dict)
    compact_json: bool = False


def make_features(
    *,
    tool_call_parser: str | None = None,
    enable_auto_tool_choice: bool = False,
    reasoning_parser_name: str | None = None,
    trust_request_chat_template: bool = False,
    default_chat_template_kwargs: Mapping[str, Any] | None = None,
    structured_outputs_config: Mapping[str, Any] | None = None,
) -> Features:
    """From the values of the command line. Raises ConfigError."""
    if enable_auto_tool_choice and tool_call_parser is None:
        raise ConfigError(
            "Calls could not be found",
            on="--enable-auto-tool-choice",
            found="no --tool-call-parser",
            expected="the parser of the model's family",
            fix="add --tool-call-parser hermes (Qwen, Hermes), llama3_json or mistral",
        )
    return Features(
        tools=None if tool_call_parser is None else tool_parser(tool_call_parser),
        auto_tools=enable_auto_tool_choice,
        reasoning=None if reasoning_parser_name is None else reasoning_parser(reasoning_parser_name),
        request_templates=trust_request_chat_template,
        template_values=_template_values(default_chat_template_kwargs or {}),
        compact_json=_compact(structured_outputs_config or {}),
    )


def _template_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    taken = TEMPLATE_ARGUMENTS & values.keys()
    if taken:
        raise ConfigError(
            "Chat template is set up wrong",
            on=f"--default-chat-template-kwargs {min(taken)}",
            found="an argument that the server gives",
            expected="arguments of the template's own",
            fix=f"leave {min(taken)} out",
        )
    return values


def _compact(config: Mapping[str, Any]) -> bool:
    known = ("backend", "disable_any_whitespace")
    for name in config:
        if name not in known:
            raise _wrong(name, "no such setting", f"one of: {', '.join(known)}", nearest(name, known))
    backend, compact = config.get("backend", "auto"), config.get("disable_any_whitespace", False)
    if backend not in BACKENDS:
        raise _wrong("backend", repr(backend), f"one of: {', '.join(BACKENDS)}", nearest(str(backend), BACKENDS))
    if not isinstance(compact, bool):
        raise _wrong("disable_any_whitespace", repr(compact), "true or false", "send true or false")
    if config and find_spec("xgrammar") is None:
        raise _wrong("backend", "a Python without xgrammar", "the extra structured of vllm-core", "pip install xgrammar")
    return compact


def _wrong(name: str, found: str, expected: str, fix: str) -> ConfigError:
    return ConfigError(
        "Structured output is set up wrong",
        on=f"--structured-outputs-config {name}",
        found=found,
        expected=expected,
        fix=fix,
    )
