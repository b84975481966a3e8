"""Prefix hashes: a chain over full blocks, each of its parent's hash and its own tokens.

BLAKE2b with 128 bits: two different prefixes with one hash would have to be searched for, and the salt keeps tenants apart
who might.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import blake2b
from struct import pack

from vllm_core.api.batch import NULL_BLOCK

DIGEST_BYTES = 16


def extend(hashes: list[bytes], tokens: Sequence[int], size: int, salt: str) -> None:
    """Append the hashes of blocks of ``size`` tokens that ``tokens`` fill and ``hashes`` lacks."""
    begin, end = len(hashes) * size, len(tokens) // size * size
    if begin == end:
        return
    # Four bytes a token; `struct` packs a list several times faster than `array`.
    words = pack(f"{end - begin}i", *tokens[begin:end])
    parent = hashes[-1] if hashes else _root(salt)
    for at in range(0, len(words), 4 * size):
        parent = blake2b(parent + words[at : at + 4 * size], digest_size=DIGEST_BYTES).digest()
        hashes.append(parent)


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
    length = len(hashes)
    for find, window in finders:
        if window is None:
            length = next((at for at in range(length) if find(hashes[at]) is None), length)
    before = -1
    # Each window may shorten what another one had agreed to.
    while before != length:
        before = length
        for find, window in finders:
            if window is not None:
                length = _fit(hashes, find, length, window, size)
    out = []
    for find, window in finders:
        first = 0 if window is None else first_needed(length, window, size)
        out.append([NULL_BLOCK] * first + [find(digest) or NULL_BLOCK for digest in hashes[first:length]])
    return length, out


def first_needed(blocks: int, window: int, size: int) -> int:
    """Index of the first block that a query after ``blocks`` full blocks still reads."""
    return max(0, (blocks * size - window + 1) // size)


def _fit(hashes: Sequence[bytes], find: Callable[[bytes], int | None], length: int, window: int, size: int) -> int:
    """The longest prefix of at most ``length`` blocks whose window is there."""
    while length:
        needed = range(length - 1, first_needed(length, window, size) - 1, -1)
        missing = next((at for at in needed if find(hashes[at]) is None), None)
        if missing is None:
            break
        # No prefix that ends behind the missing block can do without it: their windows begin before it, too.
        length = missing
    return length
