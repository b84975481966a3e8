"""Flags of what the API can do beside plain answers: tools, reasoning, structured output, templates."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_core.serve.features import Features


def add_features(section: argparse._ArgumentGroup) -> None:
    """Add the flags."""
    section.add_argument("--enable-auto-tool-choice", action="store_true", help="let the model decide whether it calls tools")
    section.add_argument(
        "--tool-call-parser", metavar="NAME", help="how the model writes calls: hermes (Qwen too), llama3_json, mistral"
    )
    section.add_argument("--reasoning-parser", metavar="NAME", help="how it marks its reasoning: qwen3, deepseek_r1")
    section.add_argument(
        "--trust-request-chat-template", action="store_true", help="let requests bring chat templates, which run in a sandbox"
    )
    section.add_argument(
        "--default-chat-template-kwargs",
        type=_object,
        default={},
        metavar="JSON",
        help="""values for the chat template where a request sends none, such as {"enable_thinking": false}""",
    )
    section.add_argument(
        "--structured-outputs-config",
        type=_object,
        default={},
        metavar="JSON",
        help="backend (auto or xgrammar), and disable_any_whitespace for JSON on one line",
    )


def features_of(args: argparse.Namespace) -> Features:
    """The features that were asked for. Raises ConfigError."""
    from vllm_core.serve.features import make_features

    return make_features(
        tool_call_parser=args.tool_call_parser,
        enable_auto_tool_choice=args.enable_auto_tool_choice,
        reasoning_parser_name=args.reasoning_parser,
        trust_request_chat_template=args.trust_request_chat_template,
        default_chat_template_kwargs=args.default_chat_template_kwargs,
        structured_outputs_config=args.structured_outputs_config,
    )


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
    return value
