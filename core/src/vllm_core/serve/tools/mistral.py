"""Calls as Mistral's models write them: ``[TOOL_CALLS]`` and a list of objects, or, from tokenizer version 11 on, the name and
its arguments: ``[TOOL_CALLS]name[ARGS]{...}`` or ``[TOOL_CALLS]name{...}``, once for each call."""

from __future__ import annotations

from collections.abc import Collection

from vllm_core.serve.tools.json_calls import ListedCalls
from vllm_core.serve.tools.pieces import Arguments, Call, Piece, Text, ToolStream, held, merged, new_call_id
from vllm_core.serve.tools.scanner import ValueScanner

MARK = "[TOOL_CALLS]"
ARGS = "[ARGS]"


class MistralCalls:
    """The first character behind the mark tells the two formats apart."""

    def __init__(self, names: Collection[str] = ()) -> None:
        self._text = ""
        self._rest: ToolStream | None = None

    def push(self, text: str) -> list[Piece]:
        """See ToolStream."""
        if self._rest is not None:
            return self._rest.push(text)
        self._text += text
        before, mark, after = self._text.partition(MARK)
        if not mark:
            kept = held(before, MARK)
            self._text = before[len(before) - kept :]
            return merged([Text(before[: len(before) - kept])])
        self._text = mark + after
        first = after.lstrip()[:1]
        if not first:
            return merged([Text(before)])
        self._rest = ListedCalls(None, MARK) if first in "[{" else _NamedCalls()
        whole, self._text = self._text, ""
        return merged([Text(before), *self._rest.push(whole)])

    def flush(self) -> list[Piece]:
        """See ToolStream."""
        if self._rest is not None:
            return self._rest.flush()
        text, self._text = self._text, ""
        return merged([Text(text)])


class _NamedCalls:
    """``[TOOL_CALLS]name[ARGS]{...}``, repeated."""

    def __init__(self) -> None:
        self._text = ""
        self._count = -1
        self._value: ValueScanner | None = None

    def push(self, text: str) -> list[Piece]:
        self._text += text
        pieces: list[Piece] = []
        while self._text and self._step(pieces):
            pass
        return merged(pieces)

    def flush(self) -> list[Piece]:
        text, self._text = self._text, ""
        return merged([Text("" if self._value is not None else text)])

    def _step(self, pieces: list[Piece]) -> bool:
        if self._value is not None:
            return self._read(self._value, pieces)
        text = self._text.lstrip()
        if not text.startswith(MARK):
            self._text = text
            if MARK.startswith(text):
                return False
            pieces.append(Text(text))
            self._text = ""
            return False
        head, brace, _ = text.partition("{")
        if not brace:
            self._text = text
            return False
        self._count += 1
        name = head[len(MARK) :].strip().removesuffix(ARGS).strip()
        pieces.append(Call(self._count, name, new_call_id()))
        self._value, self._text = ValueScanner("{"), text[len(head) :]
        return True

    def _read(self, value: ValueScanner, pieces: list[Piece]) -> bool:
        for index, char in enumerate(self._text):
            try:
                ended = value.take(char)
            except ValueError:
                ended = True
            if ended:
                pieces.append(Arguments(self._count, self._text[: index + 1]))
                self._text, self._value = self._text[index + 1 :], None
                return True
        pieces.append(Arguments(self._count, self._text))
        self._text = ""
        return False
