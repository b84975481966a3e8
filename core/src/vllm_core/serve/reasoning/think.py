"""Reasoning between ``<think>`` and ``</think>``, as Qwen3 and DeepSeek-R1 write it."""

from __future__ import annotations

from vllm_core.serve.tools.pieces import Piece, Reasoning, Text, held

BEGIN, END = "<think>", "</think>"


class ThinkStream:
    """Splits one answer. ``open`` says that it begins inside, because the prompt ended with the begin mark or the model never
    writes one; white space around the marks is dropped."""

    def __init__(self, *, open: bool) -> None:
        self._text = ""
        self._state = "inside" if open else "before"
        self._begun = self._spoken = False

    @property
    def is_inside(self) -> bool:
        """Whether what comes is reasoning, as far as is known."""
        return self._state == "inside"

    def push(self, text: str) -> list[Piece]:
        """Take further text; returns what became certain."""
        self._text += text
        pieces: list[Piece] = []
        if not self._begun and not self._begin():
            return pieces
        if self._state == "inside":
            self._inside(pieces)
        if self._state == "after":
            self._text = self._text.lstrip()
            self._state = "text" if self._text else "after"
        if self._state == "text" and self._text:
            pieces.append(Text(self._text))
            self._text = ""
        return pieces

    def flush(self) -> list[Piece]:
        """The answer has ended; returns what was held back."""
        text, self._text = self._text, ""
        if not text:
            return []
        return [Reasoning(text.rstrip())] if self._state == "inside" else [Text(text)]

    def _begin(self) -> bool:
        """Look for the begin mark at the begin; returns whether it is known if it is there."""
        start = self._text.lstrip()
        if len(start) < len(BEGIN) and BEGIN.startswith(start):
            return False
        self._begun = True
        if start.startswith(BEGIN):
            self._text, self._state = start[len(BEGIN) :], "inside"
        elif self._state == "before":
            self._state = "text"
        return True

    def _inside(self, pieces: list[Piece]) -> None:
        if not self._spoken:
            self._text = self._text.lstrip()
            self._spoken = bool(self._text)
        before, mark, after = self._text.partition(END)
        if mark:
            pieces.append(Reasoning(before.rstrip()))
            self._text, self._state = after, "after"
            return
        shown = before[: len(before) - held(before, END)].rstrip()
        pieces.append(Reasoning(shown))
        self._text = before[len(shown) :]
