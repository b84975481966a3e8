"""Parsers by name. Other distributions add theirs in the entry-point group ``vllm_core.tool_parsers``."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from importlib_metadata import entry_points

from vllm_core.errors import ConfigError, nearest
from vllm_core.serve.tools.json_calls import ListedCalls, TaggedCalls
from vllm_core.serve.tools.mistral import MistralCalls
from vllm_core.serve.tools.pieces import ToolStream

GROUP = "vllm_core.tool_parsers"


@dataclass(frozen=True, slots=True)
class ToolParser:
    """How a model family writes calls. ``make(names of the tools)`` begins an answer.

    ``special`` says that a mark is a special token, which the text of an answer would not show.
    """

    name: str
    make: Callable[[Collection[str]], ToolStream]
    special: bool = False


def _llama3(names: Collection[str]) -> ToolStream:
    # The mark is optional, and what is no call of a known tool is an answer in JSON.
    return _SkipMark(ListedCalls(names))


class _SkipMark:
    """Llama 3 may write ``<|python_tag|>`` before its calls."""

    mark = "<|python_tag|>"

    def __init__(self, rest: ToolStream) -> None:
        self._rest, self._text, self._seen = rest, "", False

    def push(self, text: str) -> list[Any]:
        if self._seen:
            return self._rest.push(text)
        self._text += text
        start = self._text.lstrip()
        if len(start) < len(self.mark) and self.mark.startswith(start):
            return []
        self._seen = True
        whole, self._text = self._text, ""
        return self._rest.push(start.removeprefix(self.mark) if start.startswith(self.mark) else whole)

    def flush(self) -> list[Any]:
        text, self._text = self._text, ""
        return [*self._rest.push(text), *self._rest.flush()]


BUILT_IN = {
    parser.name: parser
    for parser in (
        ToolParser("hermes", TaggedCalls),
        ToolParser("llama3_json", _llama3, special=True),
        ToolParser("mistral", MistralCalls, special=True),
    )
}
ALIASES = {"qwen": "hermes", "qwen2_5": "hermes", "qwen3": "hermes", "llama4_json": "llama3_json"}


def tool_parser(name: str) -> ToolParser:
    """The parser of that name. Raises ConfigError with the nearest name."""
    key = ALIASES.get(name, name)
    if key in BUILT_IN:
        return BUILT_IN[key]
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in found:
        names = [*BUILT_IN, *ALIASES, *found]
        raise ConfigError(
            "Tool parser does not exist",
            on="--tool-call-parser",
            found=repr(name),
            expected=f"one of: {', '.join(names)}",
            fix=nearest(name, names, listed=True),
        )
    parser = found[name].load()
    if not isinstance(parser, ToolParser):
        raise ConfigError(
            "Tool parser is of another kind",
            on=f"entry point {name} in {GROUP}",
            found=type(parser).__name__,
            expected="a vllm_core.serve.tools.registry.ToolParser",
            fix="correct the entry point, or take another parser",
        )
    return parser
