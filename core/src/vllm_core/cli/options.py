"""Flags made from the settings in `vllm_core.config`, and those of sampling. Only what the user set comes back."""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from vllm_core.config import ALIASES, groups, option_owners
from vllm_core.errors import ConfigError

_SHORT = {"tensor_parallel_size": ("-tp",), "data_parallel_size": ("-dp",), "quantization": ("-q",)}
_ATTENTION = "paged_attention"
"""The op that `--attention-backend` chooses a provider of."""

_SAMPLING: tuple[tuple[str, type, str], ...] = (
    ("max_tokens", int, "most tokens to generate"),
    ("temperature", float, "0 is greedy"),
    ("top_p", float, "keep the likeliest tokens up to this probability"),
    ("top_k", int, "keep this many of the likeliest tokens; 0: all"),
    ("min_p", float, "drop tokens less likely than this fraction of the likeliest"),
    ("repetition_penalty", float, "above 1: tokens of prompt and output become less likely"),
    ("presence_penalty", float, "above 0: tokens of the output become less likely"),
    ("frequency_penalty", float, "the same, for each time"),
    ("min_tokens", int, "no end before as many tokens"),
)


def add_engine_options(parser: argparse.ArgumentParser, *, leave_out: Collection[str] = ()) -> None:
    """Add a flag for each engine option."""
    for cls in groups().values():
        section = parser.add_argument_group((cls.__doc__ or cls.__name__).partition("\n")[0].rstrip("."))
        for name, field in cls.model_fields.items():
            if name not in leave_out:
                section.add_argument(*_flags(name), dest=name, default=argparse.SUPPRESS, **_kind(field), help=_help(field))
            if name == "provider":
                text = f"short for --provider {_ATTENTION}=NAME"
                section.add_argument("--attention-backend", default=argparse.SUPPRESS, metavar="NAME", help=text)


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the model, as an argument or as an option; `take_model` makes one of both."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help="folder, GGUF file, repository name, or 'demo'")
    parser.add_argument("--model", dest="named_model", metavar="MODEL", help="the same, as an option")


def take_model(args: argparse.Namespace, *, command: str, required: bool = True) -> None:
    """Settle ``args.model``. Raises ConfigError where it was given twice, or not at all and is ``required``."""
    given = [one for one in (args.model, args.named_model) if one is not None]
    if len(given) > 1 or (required and not given):
        raise ConfigError(
            "Model is not clear",
            on=command,
            found=f"{args.model} and --model {args.named_model}" if given else "no model",
            expected="one model",
            fix=f"{command} MODEL; 'demo' is a small one",
        )
    args.model = given[0] if given else None


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The engine options that were given, by name. Raises ConfigError for text that cannot be read."""
    given = {name: value for name, value in vars(args).items() if name in option_owners()}
    if "provider" in given:
        given["provider"] = dict(_pair("--provider", text) for text in given["provider"])
    if "attention_backend" in args:
        given["provider"] = {_ATTENTION: args.attention_backend, **given.get("provider", {})}
    for name in ("hf_overrides", "override_generation_config"):
        if name in given:
            given[name] = _json(_flags(name)[0], given[name])
    return given


def add_sampling_options(parser: argparse.ArgumentParser, *, max_tokens: int) -> None:
    """Add the flags of `SamplingParams`; ``--seed`` is the engine's."""
    section = parser.add_argument_group("How tokens are chosen and when to stop")
    for name, kind, text in _SAMPLING:
        default = max_tokens if name == "max_tokens" else argparse.SUPPRESS
        shown = f"{text} (default: {max_tokens})" if name == "max_tokens" else f"{text} (default: the model's)"
        section.add_argument(*_flags(name), dest=name, type=kind, default=default, help=shown, metavar="N")
    section.add_argument(
        "--stop", action="append", default=argparse.SUPPRESS, metavar="TEXT", help="stop before TEXT; repeatable"
    )
    section.add_argument(
        "--ignore-eos", action="store_true", default=argparse.SUPPRESS, help="go on after the model's end token"
    )


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling values that were given, by name."""
    names = {name for name, _, _ in _SAMPLING} | {"stop", "ignore_eos", "seed"}
    given = {name: value for name, value in vars(args).items() if name in names}
    if "seed" in given:
        given["seed"] = _integer("--seed", given["seed"])
    return given


def _flags(name: str) -> tuple[str, ...]:
    names = [name, *(alias for alias, target in ALIASES.items() if target == name)]
    return (*(f"--{n.replace('_', '-')}" for n in names), *_SHORT.get(name, ()))


def _kind(field: FieldInfo) -> dict[str, Any]:
    """How argparse reads a field. Numbers stay text: pydantic reads and checks them."""
    parts = () if get_origin(field.annotation) is dict else get_args(field.annotation)
    choices = [arg for arg in (field.annotation, *parts) if arg is not type(None)]
    if any(kind is bool or (get_origin(kind) is Literal and get_args(kind) == (False,)) for kind in choices):
        return {"action": argparse.BooleanOptionalAction}
    literals = [value for kind in choices if get_origin(kind) is Literal for value in get_args(kind)]
    if literals:
        return {"choices": literals, "metavar": "{" + ",".join(literals) + "}"}
    if any(get_origin(kind) is list for kind in choices):
        return {"action": "append", "metavar": "NAME"}
    if any(get_origin(kind) is dict and get_args(kind) == (str, str) for kind in choices):
        return {"action": "append", "metavar": "OP=NAME"}
    return {"metavar": "JSON" if any(get_origin(kind) is dict for kind in choices) else "N" if _is_number(choices) else "TEXT"}


def _is_number(choices: list[Any]) -> bool:
    return any(kind in (int, float) or (get_args(kind) and get_args(kind)[0] in (int, float)) for kind in choices)


def _help(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True) if not field.is_required() else None
    text = (field.description or "").replace("%", "%%")
    return text if default in (None, [], {}) else f"{text} (default: {default})"


def _pair(flag: str, text: str) -> tuple[str, str]:
    left, equals, right = text.partition("=")
    if not (left and equals and right):
        raise _wrong(flag, text, "OP=NAME", f"{flag} linear=reference")
    return left, right


def _json(flag: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _wrong(flag, str(error), "a JSON object", f"""{flag} '{{"rope_theta": 10000}}'""") from error
    if not isinstance(value, dict):
        raise _wrong(flag, text, "a JSON object", f"""{flag} '{{"rope_theta": 10000}}'""")
    return value


def _integer(flag: str, text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise _wrong(flag, text, "an integer", f"{flag} 0") from error


def _wrong(flag: str, found: str, expected: str, example: str) -> ConfigError:
    return ConfigError("Option has a wrong value", on=flag, found=repr(found), expected=expected, fix=f"for example {example}")
