"""Prefix hashes and the longest prefix that all groups can serve."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_core.engine import prefix

tokens = st.lists(st.integers(0, 2**31 - 1), max_size=24)
sizes = st.integers(1, 5)


def hashes_of(values, size, salt=""):
    out = []
    prefix.extend(out, values, size, salt)
    return out


@given(values=tokens, size=sizes)
def test_only_full_blocks_are_hashed(values, size):
    assert len(hashes_of(values, size)) == len(values) // size


@given(values=tokens, size=sizes, cut=st.integers(0, 24))
def test_hashing_in_pieces_gives_the_same_chain(values, size, cut):
    pieces = []
    prefix.extend(pieces, values[:cut], size, "salt")
    prefix.extend(pieces, values, size, "salt")
    assert pieces == hashes_of(values, size, "salt")


@given(one=tokens, other=tokens, size=sizes)
def test_hashes_are_equal_exactly_where_all_tokens_before_are(one, other, size):
    for at, (a, b) in enumerate(zip(hashes_of(one, size), hashes_of(other, size), strict=False)):
        assert (a == b) == (one[: (at + 1) * size] == other[: (at + 1) * size])


@given(values=st.lists(st.integers(0, 9), min_size=4, max_size=12), salts=st.tuples(st.text(), st.text()))
def test_another_salt_shares_no_hash(values, salts):
    shared = set(hashes_of(values, 2, salts[0])) & set(hashes_of(values, 2, salts[1]))
    assert bool(shared) == (salts[0] == salts[1])


def test_a_salt_with_a_lone_surrogate_is_hashed():
    assert hashes_of([1, 2], 2, "\ud800") != hashes_of([1, 2], 2, "")


def test_block_size_is_part_of_the_content():
    assert not set(hashes_of([1] * 8, 2)) & set(hashes_of([1] * 8, 4))


@pytest.mark.parametrize(
    ("blocks", "window", "size", "first"),
    [
        (0, 4, 2, 0),
        (1, 4, 2, 0),
        (2, 4, 2, 0),
        (3, 4, 2, 1),
        (3, 5, 2, 1),
        (3, 6, 2, 0),
        (3, 1, 2, 3),
        (3, 2, 2, 2),
        (9, 3, 4, 8),
    ],
)
def test_a_query_reads_back_to_its_window_and_counts_itself(blocks, window, size, first):
    assert prefix.first_needed(blocks, window, size) == first


def finder(held, names):
    return {names[at]: at + 1 for at in held}.get


def names_of(count):
    return [bytes([at]) for at in range(count)]


@pytest.mark.parametrize(
    ("held", "expected"),
    [(set(), 0), ({0}, 1), ({0, 1, 2}, 3), ({1, 2}, 0), ({0, 2, 3}, 1)],
)
def test_a_full_group_serves_what_it_holds_without_a_gap(held, expected):
    names = names_of(4)
    length, (blocks,) = prefix.longest(names, [(finder(held, names), None)], 2)
    assert length == expected
    assert blocks == [at + 1 for at in range(expected)]


def test_a_window_group_serves_a_prefix_whose_last_window_it_holds():
    names = names_of(6)
    length, (blocks,) = prefix.longest(names, [(finder({0, 3, 4}, names), 4)], 2)
    assert length == 5
    assert blocks == [0, 0, 0, 4, 5]


def servable(length, held, window, size):
    first = 0 if window is None else max(0, (length * size - window + 1) // size)
    return all(at in held for at in range(first, length))


@settings(max_examples=300)
@given(
    count=st.integers(0, 8),
    size=st.integers(1, 4),
    groups=st.lists(st.tuples(st.sets(st.integers(0, 7)), st.one_of(st.none(), st.integers(1, 14))), min_size=1, max_size=3),
)
def test_the_longest_prefix_is_what_trying_every_length_finds(count, size, groups):
    names = names_of(count)
    groups = [({at for at in held if at < count}, window) for held, window in groups]
    best = max(n for n in range(count + 1) if all(servable(n, held, window, size) for held, window in groups))
    length, tables = prefix.longest(names, [(finder(held, names), window) for held, window in groups], size)
    assert length == best
    for (_, window), blocks in zip(groups, tables, strict=True):
        first = 0 if window is None else prefix.first_needed(best, window, size)
        assert blocks == [0] * first + [at + 1 for at in range(first, best)]
