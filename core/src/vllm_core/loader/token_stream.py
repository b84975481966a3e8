"""Text from tokens as they come: whole characters only, and in all exactly what decoding at once gives.

`tokenizers.DecodeStream` is not used: it has no flush, holds back everything behind an invalid byte, and raises on
some sequences that models do produce.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

_REPLACEMENT = "\ufffd"
_KEPT, _MOST = 5, 12
"""Tokens decoded again with new ones. A character has at most four bytes, hence tokens; one more gives the context in
which decoders keep a leading space."""


class TokenStream(Protocol):
    """Incremental decoding of one sequence."""

    def push(self, ids: Sequence[int]) -> str:
        """Take further tokens; return the text that became complete."""
        ...

    def flush(self) -> str:
        """Return what is held back. The sequence has ended; the stream is not used again."""
        ...


class ByteStream:
    """For byte-level vocabularies, where a token is bytes whatever surrounds it."""

    def __init__(self, token_bytes: Mapping[int, bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_whole = True

    def push(self, ids: Sequence[int]) -> str:
        """See TokenStream."""
        table = self._token_bytes
        data = table[ids[0]] if len(ids) == 1 else b"".join([table[token] for token in ids])
        if self._is_whole and data.isascii():
            return data.decode("ascii")  # most tokens; half the time of the decoder
        text = self._decoder.decode(data)
        self._is_whole = not self._decoder.getstate()[0]
        return text

    def flush(self) -> str:
        """See TokenStream."""
        return self._decoder.decode(b"", True)


class WindowStream:
    """For any other decoder: the last tokens are decoded again together with the new ones.

    ``held(token)`` tells tokens whose text depends on what follows: byte tokens of a sentencepiece vocabulary, a run of
    which decodes to characters only if all of it is valid.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], held: Callable[[int], bool], skipped: frozenset[int]) -> None:
        self._decode, self._held, self._skipped = decode, held, skipped
        self._ids: list[int] = []
        self._settled = 0
        self._shown = 0

    def push(self, ids: Sequence[int]) -> str:
        """See TokenStream."""
        window = self._ids
        window.extend(token for token in ids if token not in self._skipped)
        end = len(window)
        while end > self._settled and self._held(window[end - 1]):
            end -= 1
        if end == self._settled:
            return ""
        self._settled = end
        text = self._decode(window[:end])
        stable = len(text) - text.endswith(_REPLACEMENT)
        fresh = text[self._shown : stable]
        self._shown = max(stable, self._shown)
        if end > _MOST:
            self._forget(end, len(text) - self._shown)
        return fresh

    def flush(self) -> str:
        """See TokenStream."""
        return self._decode(self._ids)[self._shown :]

    def _forget(self, end: int, pending: int) -> None:
        del self._ids[: end - _KEPT]
        self._settled = _KEPT
        self._shown = len(self._decode(self._ids[:_KEPT])) - pending
