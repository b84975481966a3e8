"""Prefix hashes: a chain over full blocks, each of its parent's hash and its own tokens.

BLAKE2b with 128 bits: two different prefixes with one hash would have to be searched for, and the salt keeps tenants apart
who might.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import blake2b

DIGEST_BYTES = 16


def extend(hashes: list[bytes], tokens: Sequence[int], size: int, salt: str) -> None:
    """Append the hashes of blocks of ``size`` tokens that ``tokens`` fill and ``hashes`` lacks."""
    for start in range(len(hashes) * size, len(tokens) - size + 1, size):
        digest = blake2b(digest_size=DIGEST_BYTES)
        digest.update(hashes[-1] if hashes else _root(salt))
        digest.update(array("i", tokens[start : start + size]).tobytes())
        hashes.append(digest.digest())


@lru_cache(maxsize=1024)
def _root(salt: str) -> bytes:
    """What stands for the parent of a first block: one per salt."""
    return blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()


def longest(
    hashes: Sequence[bytes], finders: Sequence[tuple[Callable[[bytes], int | None], int | None]], size: int
) -> tuple[int, list[list[int]]]:
    """The longest prefix, in blocks, that every group can serve, and each group's blocks for it.

    ``finders`` has, per group, how to find a block and the window in tokens (None: all tokens are needed). A window group
    needs only the blocks that cover the last window - 1 tokens of the prefix; the others are null (0).
    """
    found = [[find(digest) for digest in _until_missing(hashes, find, window)] for find, window in finders]
    limit = min((len(blocks) for blocks in found), default=0)
    for (_, window), blocks in zip(finders, found, strict=True):
        if window is not None:
            limit = _fit(blocks, limit, window, size)
    # A later group may have shortened the prefix below what an earlier window group needs again.
    while limit and any(w is not None and _fit(b, limit, w, size) != limit for (_, w), b in zip(finders, found, strict=True)):
        limit -= 1
    out = []
    for (_, window), blocks in zip(finders, found, strict=True):
        first = 0 if window is None else first_needed(limit, window, size)
        out.append([0] * first + [block or 0 for block in blocks[first:limit]])
    return limit, out


def first_needed(blocks: int, window: int, size: int) -> int:
    """Index of the first block that a query after ``blocks`` full blocks still reads."""
    return max(0, (blocks * size - window + 1) // size)


def _until_missing(hashes: Sequence[bytes], find: Callable[[bytes], int | None], window: int | None) -> Sequence[bytes]:
    if window is not None:
        return hashes
    for index, digest in enumerate(hashes):
        if find(digest) is None:
            return hashes[:index]
    return hashes


def _fit(blocks: Sequence[int | None], limit: int, window: int, size: int) -> int:
    """The longest prefix of at most ``limit`` blocks whose window is there."""
    run = 0
    best = 0
    for index in range(limit):
        run = run + 1 if blocks[index] is not None else 0
        if run >= index + 1 - first_needed(index + 1, window, size):
            best = index + 1
    return best
