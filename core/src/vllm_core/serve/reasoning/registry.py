"""Reasoning parsers by name. Other distributions add theirs in the entry-point group ``vllm_core.reasoning_parsers``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from importlib_metadata import entry_points

from vllm_core.errors import ConfigError, nearest
from vllm_core.serve.reasoning.think import BEGIN, END, ThinkStream
from vllm_core.serve.tools.pieces import Piece

GROUP = "vllm_core.reasoning_parsers"


class ReasoningStream(Protocol):
    """Splits one answer, whose text comes in parts of any size."""

    @property
    def is_inside(self) -> bool: ...
    def push(self, text: str) -> list[Piece]: ...
    def flush(self) -> list[Piece]: ...


@dataclass(frozen=True, slots=True)
class ReasoningParser:
    """How a model family marks its reasoning. ``make(prompt)`` begins the answer to a rendered prompt; ``end`` is the mark
    after which the answer itself comes."""

    name: str
    make: Callable[[str], ReasoningStream]
    end: str


def _is_open(prompt: str) -> bool | None:
    """Whether the prompt ends inside a reasoning that it opened; None where it says nothing."""
    tail = prompt.rstrip()[-len(END) :]
    return True if tail.endswith(BEGIN) else False if tail == END else None


BUILT_IN = {
    # Qwen3 writes the begin mark itself; a template that opens it, or closes it at once, has decided.
    "qwen3": ReasoningParser("qwen3", lambda prompt: ThinkStream(open=_is_open(prompt) is True), END),
    # DeepSeek-R1 thinks in any case, and may leave the begin mark out.
    "deepseek_r1": ReasoningParser("deepseek_r1", lambda prompt: ThinkStream(open=_is_open(prompt) is not False), END),
}


def closes(prompt: str) -> bool:
    """Whether a prompt ends with a reasoning that is over, so that the answer has none."""
    return _is_open(prompt) is False


def reasoning_parser(name: str) -> ReasoningParser:
    """The parser of that name. Raises ConfigError with the nearest name."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in found:
        names = [*BUILT_IN, *found]
        raise ConfigError(
            "Reasoning parser does not exist",
            on="--reasoning-parser",
            found=repr(name),
            expected=f"one of: {', '.join(names)}",
            fix=nearest(name, names, listed=True),
        )
    parser = found[name].load()
    if not isinstance(parser, ReasoningParser):
        raise ConfigError(
            "Reasoning parser is of another kind",
            on=f"entry point {name} in {GROUP}",
            found=type(parser).__name__,
            expected="a vllm_core.serve.reasoning.registry.ReasoningParser",
            fix="correct the entry point, or take another parser",
        )
    return parser
