"""Reads one JSON object that describes a call, character by character: ``{"name": ..., "arguments": {...}}``."""

from __future__ import annotations

import json
from typing import Literal

_NAMES = ("name", "function")
_ARGUMENTS = ("arguments", "parameters")
_SPACE = " \t\r\n"
_MOST_NESTED = 64

State = Literal["start", "key", "in key", "colon", "value", "in value", "next", "done", "broken"]


class ValueScanner:
    """Follows one JSON value to its end. Numbers and words end before the character that follows them."""

    __slots__ = ("_depth", "_escaped", "_in_string", "is_text", "is_word")

    def __init__(self, first: str) -> None:
        self.is_text, self.is_word = first == '"', first not in '"{['
        self._depth, self._in_string, self._escaped = 0, False, False

    def take(self, char: str) -> bool:
        """Take a character; returns whether the value has ended with it. Raises ValueError where it cannot be JSON."""
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
            return not self._in_string and self._depth == 0
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
            if self._depth > _MOST_NESTED:
                raise ValueError("nested too deeply")
        elif char in "}]":
            self._depth -= 1
            return self._depth == 0
        return False


class CallScanner:
    """One object. `name` is known once it was read; arguments come by `take_arguments` as they are written."""

    def __init__(self) -> None:
        self.state: State = "start"
        self.name: str | None = None
        self.has_arguments = False
        """Whether the arguments have begun, complete or not."""
        self._arguments: list[str] = []
        self._key = self._raw = ""
        self._value: ValueScanner | None = None

    def push(self, text: str) -> int:
        """Take text up to the object's end; returns how many characters were used, none beyond the end or a fault."""
        for index, char in enumerate(text):
            if self.state in ("done", "broken"):
                return index
            self._take(char)
            if self.state == "broken":
                return index
        return len(text)

    def take_arguments(self) -> str:
        """What was read of the arguments since the last call. A text that holds JSON comes decoded, once complete."""
        out = "".join(self._arguments)
        self._arguments.clear()
        return out

    def _take(self, char: str) -> None:
        state = self.state
        if state == "in key":
            self._take_key(char)
        elif state == "in value":
            self._take_value(char)
        elif char in _SPACE:
            return
        elif state == "start":
            self.state = "key" if char == "{" else "broken"
        elif state == "key":
            self.state = "in key" if char == '"' else "done" if char == "}" else "broken"
            self._key = ""
        elif state == "colon":
            self.state = "value" if char == ":" else "broken"
        elif state == "value":
            self._begin(char)
        else:
            self.state = "key" if char == "," else "done" if char == "}" else "broken"

    def _take_key(self, char: str) -> None:
        if char == '"':
            self.state = "colon"
        elif char == "\\" or len(self._key) > 64:
            self.state = "broken"
        else:
            self._key += char

    def _begin(self, char: str) -> None:
        self._value, self._raw, self.state = ValueScanner(char), "", "in value"
        if self._key in _ARGUMENTS:
            if char not in '{"':
                self.state = "broken"
                return
            self.has_arguments = True
        elif self._key in _NAMES and char != '"':
            self.state = "broken"
            return
        self._take_value(char)

    def _take_value(self, char: str) -> None:
        value = self._value
        assert value is not None, "inside a value"
        if value.is_word:
            if char in ",}" + _SPACE:
                self.state = "next"
                self._take(char)
            return
        try:
            ended = value.take(char)
        except ValueError:
            self.state = "broken"
            return
        if self._key in _ARGUMENTS and not value.is_text:
            self._arguments.append(char)
        elif self._key in _ARGUMENTS or self._key in _NAMES:
            self._raw += char
        if ended:
            self.state = "next"
            if self._raw:
                self._end_text()

    def _end_text(self) -> None:
        try:
            text = json.loads(self._raw, strict=False)
            text.encode()  # half of a surrogate pair is nothing that an answer could carry
        except ValueError:
            self.state = "broken"
            return
        if self._key in _NAMES:
            self.name = text
        else:
            self._arguments.append(text)
