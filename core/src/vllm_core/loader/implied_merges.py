"""The merges that a vocabulary implies, where a file has none: every cut of a token into two tokens.

A vocabulary of 262,144 tokens has 1.5 million cuts, and a start waits for them: both sides are looked up by hash, all at once.
Two of as many texts have one hash of 64 bits in one of a hundred million vocabularies; the tokenizer then refuses the merge.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Hashes: TypeAlias = NDArray[np.uint64]
    Places: TypeAlias = NDArray[np.int64]

_BASE = 0x9E3779B97F4A7C15
"""Odd, so that it has an inverse modulo 2**64: a part's hash is that of a text's two beginnings, moved to the start."""


def implied_merges(tokens: Sequence[str], scores: Sequence[float] | None) -> list[tuple[str, str]]:
    """Pairs of ``tokens`` (each there once, at least one) that join to a token.

    They are in the order of the tokens; with ``scores``, one for each token, that of the highest comes first. Of one token, and
    of equal ones, those with the longest left part come first.
    """
    lengths = np.fromiter(map(len, tokens), dtype=np.int64, count=len(tokens))
    whole, left, right = _cuts(tokens, lengths)
    if scores is not None:
        best = np.lexsort((-lengths[right], -lengths[left], -np.asarray(scores, dtype=np.float64)[whole]))
        whole, left, right = whole[best], left[best], right[best]
    text = tokens.__getitem__
    return list(zip(map(text, left.tolist()), map(text, right.tolist()), strict=True))


def _cuts(tokens: Sequence[str], lengths: Places) -> tuple[Places, Places, Places]:
    """Places in ``tokens`` of the whole, the left and the right of each cut, by whole, the longest left first."""
    codes = np.frombuffer("".join(tokens).encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    ends = np.cumsum(lengths)
    begins = ends - lengths
    hashes = _Hashes(codes)
    known = hashes.of(begins, ends)
    by_hash = np.argsort(known)
    known = known[by_hash]

    owner = np.repeat(np.arange(len(tokens)), lengths)
    # From the end of each token to its start; where a token begins nothing is cut.
    cut = ends[owner] - 1 - (np.arange(len(codes)) - begins[owner])
    inner = cut != begins[owner]
    owner, cut = owner[inner], cut[inner]

    at, there = _find(known, hashes.of(begins[owner], cut))
    owner, cut, left = owner[there], cut[there], by_hash[at[there]]
    at, there = _find(known, hashes.of(cut, ends[owner]))
    return owner[there], left[there], by_hash[at[there]]


class _Hashes:
    """Hashes of all parts of a text: the sum of code times base to the power of its place in the part, modulo 2**64."""

    def __init__(self, codes: NDArray[np.uint32]) -> None:
        self._inverse = _powers(pow(_BASE, -1, 1 << 64), len(codes))
        self._sums = np.zeros(len(codes) + 1, dtype=np.uint64)
        # Plus one: else a text and the same with characters of code 0 after it would be one.
        np.cumsum((codes.astype(np.uint64) + np.uint64(1)) * _powers(_BASE, len(codes))[:-1], out=self._sums[1:])

    def of(self, begin: Places, end: Places) -> Hashes:
        """Those of the characters from ``begin`` up to ``end``."""
        found: Hashes = (self._sums[end] - self._sums[begin]) * self._inverse[begin]
        return found


def _powers(base: int, count: int) -> Hashes:
    """0 to ``count``; arithmetic of arrays wraps."""
    powers = np.full(count + 1, base, dtype=np.uint64)
    powers[0] = 1
    found: Hashes = np.cumprod(powers, dtype=np.uint64)
    return found


def _find(known: Hashes, wanted: Hashes) -> tuple[Places, NDArray[np.bool_]]:
    """Where each is in ``known``, which is sorted and not empty, and whether it is."""
    at = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
    return at, known[at] == wanted
