"""Block tables over all groups: room, shared prefixes, windows, and what is given back."""

from __future__ import annotations

import pytest

from vllm_core.engine.kvtables import KVTables
from vllm_core.engine.request import Request


@pytest.fixture
def holder(fake):
    """A request in a slot, for tables of so many groups."""

    def make(tables, prompt=8, slot=0, **options):
        request = Request(fake.request("a", prompt, max_tokens=30, **options), (0, 1), len(tables.groups), 64, 0.0)
        request.slot = slot
        return request

    return make


def admit(tables, request, count):
    num_blocks, matched = tables.match(request)
    return tables.admit(request, matched, num_blocks * tables.size, count)


def written(tables, request, done):
    """The request's tokens up to ``done`` have been computed and read."""
    request.done = done
    tables.settle(request)


def free(tables):
    return [pool.num_free for pool in tables.pools]


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (4, 1), (5, 2), (8, 2)])
def test_admission_gives_room_for_the_tokens_asked_for(fake, holder, tokens, blocks):
    tables = KVTables([fake.group(9, size=4)], caching=False)
    request = holder(tables, slot=3)
    assert admit(tables, request, tokens)
    assert len(request.blocks[0]) == blocks
    assert request.limit == 4 * blocks
    assert free(tables) == [8 - blocks]
    assert tables.changes == [(0, 3, at, block) for at, block in enumerate(request.blocks[0])]


def test_growing_tells_only_the_new_entries(fake, holder):
    tables = KVTables([fake.group(9, size=4)], caching=False)
    request = holder(tables)
    admit(tables, request, 4)
    tables.changes.clear()
    assert tables.grow(request, 9)
    assert tables.changes == [(0, 0, 1, request.blocks[0][1]), (0, 0, 2, request.blocks[0][2])]
    tables.changes.clear()
    assert tables.grow(request, 12)
    assert tables.changes == []


def test_a_request_that_one_group_has_no_room_for_changes_no_group(fake, holder):
    tables = KVTables([fake.group(9, 4, None, 0), fake.group(3, 4, 16, 1)], caching=False)
    request = holder(tables, 12)
    assert not admit(tables, request, 12)
    assert (free(tables), tables.changes, request.blocks) == ([8, 2], [], [[], []])
    assert admit(tables, request, 8)
    tables.changes.clear()
    assert not tables.grow(request, 9)
    assert (free(tables), tables.changes, [len(b) for b in request.blocks]) == ([6, 0], [], [2, 2])


def test_the_room_of_a_request_is_that_of_its_tightest_group(fake, holder):
    tables = KVTables([fake.group(9, 4, None, 0), fake.group(9, 3, 16, 1)], caching=False)
    request = holder(tables)
    admit(tables, request, 4)
    assert request.limit == 4
    assert tables.grow(request, 5)
    assert request.limit == 6


def test_without_groups_there_is_always_room(holder):
    tables = KVTables([], caching=True)
    request = holder(tables)
    assert admit(tables, request, 8)
    assert tables.grow(request, 1000)
    assert not tables.caching
    assert tables.usage == 0
    tables.release(request)
    assert tables.reset_cache()


def test_a_block_is_found_only_when_all_its_tokens_have_been_read_back(fake, holder):
    tables = KVTables([fake.group(9, size=4)], caching=True)
    request = holder(tables, 9)
    admit(tables, request, 9)
    for done, found in ((3, 0), (4, 1), (7, 1), (9, 2)):
        written(tables, request, done)
        assert tables.match(holder(tables, 9))[0] == found


def test_a_match_leaves_one_token_to_compute(fake, holder):
    tables = KVTables([fake.group(9, size=4)], caching=True)
    request = holder(tables, 8)
    admit(tables, request, 8)
    written(tables, request, 8)
    assert tables.match(holder(tables, 8))[0] == 1
    assert tables.match(holder(tables, 9))[0] == 2


def test_matched_blocks_that_are_idle_count_as_taken(fake, holder):
    """Three blocks are free, two of them hold the match: room for one block more, not for three."""
    tables = KVTables([fake.group(4, size=4)], caching=True)
    first = holder(tables, 9)
    admit(tables, first, 9)
    written(tables, first, 9)
    tables.release(first)
    num_blocks, matched = tables.match(request := holder(tables, 20))
    assert num_blocks == 2
    assert not tables.admit(request, [list(b) for b in matched], 8, 5)
    assert free(tables) == [3]
    assert tables.admit(request, matched, 8, 4)
    assert free(tables) == [0]
    assert len(set(request.blocks[0])) == 3


def test_blocks_that_are_shared_are_freed_by_the_last_owner(fake, holder):
    tables = KVTables([fake.group(9, size=4)], caching=True)
    first, second = holder(tables, 9, slot=0), holder(tables, 9, slot=1)
    admit(tables, first, 9)
    written(tables, first, 9)
    admit(tables, second, 1)
    assert second.blocks[0][:2] == first.blocks[0][:2]
    assert second.blocks[0][2] != first.blocks[0][2]
    assert (second.scheduled, second.done) == (8, 8)
    tables.release(first)
    assert free(tables) == [5]
    tables.release(second)
    assert free(tables) == [8]


def test_the_end_of_a_sequence_is_evicted_before_its_beginning(fake, holder):
    tables = KVTables([fake.group(5, size=4)], caching=True)
    first = holder(tables, 16)
    admit(tables, first, 16)
    written(tables, first, 16)
    tables.release(first)
    other = holder(tables, [6] * 8, slot=1)
    admit(tables, other, 8)
    assert tables.match(holder(tables, 16))[0] == 2


def test_a_window_gives_back_what_no_query_reads_again(fake, holder):
    size, window = 2, 5
    tables = KVTables([fake.group(33, size, window)], caching=False)
    request = holder(tables, 20)
    admit(tables, request, 20)
    for done in range(1, 21):
        written(tables, request, done)
        kept = [at for at, block in enumerate(request.blocks[0]) if block]
        # The next query is at position `done` and reads from done - window + 1 on.
        assert kept[0] == max(0, done - window + 1) // size
        assert free(tables) == [32 - len(kept)]


def test_a_window_that_was_given_back_stays_findable_until_it_is_evicted(fake, holder):
    tables = KVTables([fake.group(33, 2, None, 0), fake.group(9, 2, 4, 1)], caching=True)
    request = holder(tables, 16)
    admit(tables, request, 16)
    written(tables, request, 16)
    assert tables.match(holder(tables, 7))[0] == 3
    other = holder(tables, [6] * 14, slot=1)
    assert admit(tables, other, 12), "six blocks are free, though the cache knows them"
    assert tables.match(holder(tables, 7))[0] == 0
    assert tables.match(holder(tables, 17))[0] == 8, "the last window is still owned"


def test_a_matched_window_prefix_owns_only_the_blocks_it_reads(fake, holder):
    tables = KVTables([fake.group(33, 2, None, 0), fake.group(33, 2, 4, 1)], caching=True)
    request = holder(tables, 16)
    admit(tables, request, 16)
    written(tables, request, 16)
    tables.release(request)
    tables.changes.clear()
    again = holder(tables, 17, slot=2)
    assert admit(tables, again, 1)
    assert again.blocks[1][:6] == [0] * 6
    assert all(again.blocks[1][6:])
    assert free(tables) == [32 - 9, 32 - 3]
    assert [(group, at) for group, _, at, _ in tables.changes] == [(0, at) for at in range(9)] + [(1, at) for at in (6, 7, 8)]
    tables.release(again)
    assert free(tables) == [32, 32]


@pytest.mark.parametrize("options", [{"prompt_logprobs": 0}])
def test_a_request_that_wants_every_output_finds_nothing(fake, holder, options):
    tables = KVTables([fake.group(9, size=2)], caching=True)
    request = holder(tables, 9)
    admit(tables, request, 9)
    written(tables, request, 9)
    assert tables.match(holder(tables, 9))[0] == 4
    assert tables.match(holder(tables, 9, **options)) == (0, [[]])


def test_block_sizes_that_differ_turn_caching_off(fake):
    assert KVTables([fake.group(9, 2), fake.group(9, 2, 4, 1)], caching=True).caching
    assert not KVTables([fake.group(9, 2), fake.group(9, 4, 4, 1)], caching=True).caching
    assert not KVTables([fake.group(9, 2)], caching=False).caching


def test_usage_is_of_the_fullest_group(fake, holder):
    tables = KVTables([fake.group(11, 4, None, 0), fake.group(5, 4, 16, 1)], caching=False)
    admit(tables, holder(tables), 8)
    assert tables.usage == pytest.approx(0.5)


def test_the_cache_is_forgotten_only_when_nobody_owns_a_block(fake, holder):
    tables = KVTables([fake.group(9, size=2)], caching=True)
    request = holder(tables, 9)
    admit(tables, request, 9)
    written(tables, request, 9)
    assert not tables.reset_cache()
    tables.release(request)
    assert tables.match(holder(tables, 9))[0] == 4
    assert tables.reset_cache()
    assert tables.match(holder(tables, 9))[0] == 0


@pytest.mark.parametrize(
    ("window", "tokens", "chunk", "blocks"), [(None, 9, 100, 3), (6, 9, 100, 3), (6, 100, 8, 5), (6, 100, 1, 3)]
)
def test_a_sequence_needs_its_tokens_or_its_window_and_a_chunk(fake, window, tokens, chunk, blocks):
    group = fake.group(99, 4, window)
    assert KVTables([group], caching=False).blocks_for(group, tokens, chunk) == blocks
