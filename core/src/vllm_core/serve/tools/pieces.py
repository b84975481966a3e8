"""Pieces of an answer, as parsers find them while it is written."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Text:
    """Further text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Further text of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A call begins; ``index`` counts the calls of one answer."""

    index: int
    name: str
    id: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """Further text of a call's arguments, which together are JSON."""

    index: int
    text: str


Piece = Text | Reasoning | Call | Arguments


class ToolStream(Protocol):
    """Finds the calls in one answer, whose text comes in parts of any size. However it is cut, the same comes out."""

    def push(self, text: str) -> list[Piece]:
        """Take further text; returns what became certain."""

    def flush(self) -> list[Piece]:
        """The answer has ended; returns what was held back."""


def new_call_id() -> str:
    """An id that no other call has."""
    return f"call_{uuid.uuid4().hex[:24]}"


def held(text: str, mark: str) -> int:
    """Characters at the end of ``text`` that may be the beginning of ``mark``."""
    for size in range(min(len(mark) - 1, len(text)), 0, -1):
        if mark.startswith(text[-size:]):
            return size
    return 0


def merged(pieces: list[Piece]) -> list[Piece]:
    """Neighbours of one kind as one piece, empty ones left out."""
    out: list[Piece] = []
    for piece in pieces:
        last = out[-1] if out else None
        if not isinstance(piece, Call) and not piece.text:
            continue
        if isinstance(piece, Text) and isinstance(last, Text):
            out[-1] = Text(last.text + piece.text)
        elif isinstance(piece, Reasoning) and isinstance(last, Reasoning):
            out[-1] = Reasoning(last.text + piece.text)
        elif isinstance(piece, Arguments) and isinstance(last, Arguments) and last.index == piece.index:
            out[-1] = Arguments(last.index, last.text + piece.text)
        else:
            out.append(piece)
    return out
