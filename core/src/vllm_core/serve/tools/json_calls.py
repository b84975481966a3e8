"""Calls written as JSON objects between marks: the formats of Hermes and Qwen, Llama 3, Mistral, and our own constraint."""

from __future__ import annotations

from collections.abc import Collection

from vllm_core.serve.tools.pieces import Arguments, Call, Piece, Text, held, merged, new_call_id
from vllm_core.serve.tools.scanner import CallScanner


class CallReader:
    """One call object. Until its name and the begin of its arguments are known, nothing is said, so that it can still turn out
    to be text."""

    def __init__(self, index: int, names: Collection[str] | None) -> None:
        self.index, self.began = index, False
        self.raw = ""
        """All that was read, for what turns out to be text."""
        self._names = names
        self._scanner = CallScanner()
        self._written = False

    @property
    def ended(self) -> bool:
        """Whether the object is complete, or broken."""
        return self._scanner.state in ("done", "broken")

    def push(self, text: str, pieces: list[Piece]) -> int:
        """Take text; appends what became certain and returns how many characters were used."""
        used = self._scanner.push(text)
        if not self.began:
            self.raw += text[:used]
        scanner = self._scanner
        known = scanner.name is not None and (self._names is None or scanner.name in self._names)
        if not self.began and known and (scanner.has_arguments or scanner.state == "done"):
            assert scanner.name is not None, "known"
            self.began = True
            pieces.append(Call(self.index, scanner.name, new_call_id()))
        if self.began:
            written = scanner.take_arguments()
            self._written = self._written or bool(written)
            pieces.append(Arguments(self.index, written))
            if scanner.state == "done" and not self._written:
                pieces.append(Arguments(self.index, "{}"))
                self._written = True
        return used


class TaggedCalls:
    """``<tool_call>{...}</tool_call>`` among text (Hermes, Qwen 2.5 and 3): one object between two marks, repeated."""

    begin, end = "<tool_call>", "</tool_call>"

    def __init__(self, names: Collection[str] = ()) -> None:
        self._text = ""
        self._reader: CallReader | None = None
        self._closing = False
        self._count = 0

    def push(self, text: str) -> list[Piece]:
        """See ToolStream."""
        self._text += text
        pieces: list[Piece] = []
        while self._step(pieces):
            pass
        return merged(pieces)

    def flush(self) -> list[Piece]:
        """See ToolStream."""
        pieces: list[Piece] = []
        if self._reader is not None and not self._reader.began:
            pieces.append(Text(self.begin + self._reader.raw))
        if not (self._count and self._closing and self.end.startswith(self._text.strip())):
            pieces.append(Text("" if self._count and not self._text.strip() else self._text))
        self._text, self._reader = "", None
        return merged(pieces)

    def _step(self, pieces: list[Piece]) -> bool:
        """Read up to the next mark; returns whether there may be more to read."""
        if self._closing:
            return self._close(pieces)
        if self._reader is not None:
            return self._read(self._reader, pieces)
        before, mark, after = self._text.partition(self.begin)
        if mark:
            # White space before a call is its own, not the answer's.
            pieces.append(Text(before.rstrip()))
            self._text, self._reader = after, CallReader(self._count, None)
            return True
        return self._keep(before, pieces)

    def _keep(self, text: str, pieces: list[Piece]) -> bool:
        """Pass text on, all but what may belong to a mark."""
        shown = text[: len(text) - held(text, self.begin)].rstrip()
        pieces.append(Text(shown))
        self._text = text[len(shown) :]
        return False

    def _read(self, reader: CallReader, pieces: list[Piece]) -> bool:
        used = reader.push(self._text, pieces)
        self._text = self._text[used:]
        if not reader.ended:
            return False
        self._reader = None
        if reader.began:
            self._count += 1
            self._closing = True
        else:
            pieces.append(Text(self.begin + reader.raw))
        return True

    def _close(self, pieces: list[Piece]) -> bool:
        """Skip what comes up to the end mark; where that does not come, the next begin mark or other text ends the call."""
        text = self._text.lstrip()
        if text.startswith(self.end):
            self._text, self._closing = text[len(self.end) :], False
            return bool(self._text)
        if self.end.startswith(text):
            return False
        self._closing = False
        return True


class ListedCalls:
    """Objects in a JSON list, or one after the other: ``mark [{...}, {...}]``. With a mark, what comes before it is text;
    without, the answer as a whole is calls or text."""

    def __init__(self, names: Collection[str] | None, mark: str = "", separators: str = "[],; \t\r\n") -> None:
        self._names, self._mark, self._separators = names, mark, separators
        self._text = ""
        self._gap = ""
        self._inside, self._over = not mark, False
        self._reader: CallReader | None = None
        self._count = 0

    def push(self, text: str) -> list[Piece]:
        """See ToolStream."""
        if self._over:
            return merged([Text(text)])
        self._text += text
        pieces: list[Piece] = []
        if not self._inside:
            self._find(pieces)
        while self._inside and self._text and self._step(pieces):
            pass
        return merged(pieces)

    def flush(self) -> list[Piece]:
        """See ToolStream."""
        pieces: list[Piece] = []
        if self._reader is not None and not self._reader.began:
            pieces.append(Text(self._gap + self._reader.raw))
        elif self._reader is None and not self._count:
            pieces.append(Text(self._gap))
        pieces.append(Text(self._text))
        self._text, self._reader = "", None
        return merged(pieces)

    def _find(self, pieces: list[Piece]) -> None:
        before, mark, after = self._text.partition(self._mark)
        kept = 0 if mark else held(before, self._mark)
        pieces.append(Text(before[: len(before) - kept]))
        self._inside = bool(mark)
        self._text = after if mark else before[len(before) - kept :]

    def _step(self, pieces: list[Piece]) -> bool:
        if self._reader is None:
            rest = self._text.lstrip(self._separators)
            self._gap += self._text[: len(self._text) - len(rest)]
            self._text = rest
            if not rest:
                return False
            if rest[0] != "{":
                return self._give_up(pieces, "")
            self._reader = CallReader(self._count, self._names)
        used = self._reader.push(self._text, pieces)
        self._text = self._text[used:]
        if not self._reader.ended:
            return False
        reader, self._reader = self._reader, None
        if not reader.began:
            return self._give_up(pieces, reader.raw)
        self._count += 1
        self._gap = ""
        return True

    def _give_up(self, pieces: list[Piece], raw: str) -> bool:
        """What does not look like a call is text, and so is all that follows."""
        pieces.append(Text(self._gap + raw + self._text))
        self._gap = self._text = ""
        self._over = True
        return False


class NamedCall:
    """The whole answer is the arguments of one call whose name was given with the request."""

    def __init__(self, name: str) -> None:
        self._name, self._began = name, False

    def push(self, text: str) -> list[Piece]:
        """See ToolStream."""
        if not text:
            return []
        begin: list[Piece] = [] if self._began else [Call(0, self._name, new_call_id())]
        self._began = True
        return [*begin, Arguments(0, text)]

    def flush(self) -> list[Piece]:
        """See ToolStream."""
        return []
