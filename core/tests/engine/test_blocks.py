"""The block pool: each block has its owners or is free, content stays findable until its block is taken."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vllm_core.api.batch import NULL_BLOCK
from vllm_core.engine.blocks import BlockPool


def test_the_null_block_is_never_given():
    pool = BlockPool(5)
    assert pool.num_free == 4
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert pool.num_free == 0


def test_more_than_is_free_is_a_mistake_of_the_caller():
    pool = BlockPool(3)
    with pytest.raises(AssertionError, match="more blocks than are free"):
        pool.allocate(3)
    assert pool.num_free == 2


def test_a_block_freed_twice_is_noticed():
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.free([block])
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free([block])


def test_null_blocks_are_passed_over():
    pool = BlockPool(3)
    blocks = pool.allocate(1)
    pool.share([NULL_BLOCK, *blocks])
    pool.free([NULL_BLOCK, *blocks, NULL_BLOCK, *blocks])
    assert pool.num_free == 2


def test_a_shared_block_is_free_when_its_last_owner_lets_go():
    pool = BlockPool(3)
    blocks = pool.allocate(1)
    pool.share(blocks)
    pool.free(blocks)
    assert pool.num_free == 1
    pool.free(blocks)
    assert pool.num_free == 2


def test_content_outlives_its_owner_and_can_be_owned_again():
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.register(block, b"x")
    pool.free([block])
    assert pool.find(b"x") == block
    assert pool.num_idle([block, NULL_BLOCK]) == 1
    pool.share([block])
    assert pool.num_idle([block]) == 0
    assert pool.num_free == 1


def test_blocks_without_content_go_first_then_the_content_used_longest_ago():
    pool = BlockPool(5)
    first, second, third, plain = pool.allocate(4)
    for block, digest in ((first, b"1"), (second, b"2"), (third, b"3")):
        pool.register(block, digest)
    pool.free([third, first, plain, second])
    pool.share([first])
    pool.free([first])
    assert [pool.allocate(1)[0] for _ in range(4)] == [plain, third, second, first]
    assert [pool.find(digest) for digest in (b"1", b"2", b"3")] == [None, None, None]


def test_the_first_block_of_a_content_stays_and_a_second_remains_private():
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    pool.register(first, b"x")
    pool.register(second, b"x")
    assert pool.find(b"x") == first
    pool.free([second])
    assert pool.find(b"x") == first
    assert pool.allocate(1) == [second], "it had no content to keep"


def test_a_block_keeps_its_first_content():
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.register(block, b"x")
    pool.register(block, b"y")
    assert (pool.find(b"x"), pool.find(b"y")) == (block, None)


def test_content_of_a_free_block_cannot_be_registered():
    pool = BlockPool(3)
    with pytest.raises(AssertionError, match="without an owner"):
        pool.register(1, b"x")


def test_forgotten_content_is_not_found_and_its_block_can_be_used():
    pool = BlockPool(3)
    owned, idle = pool.allocate(2)
    pool.register(owned, b"owned")
    pool.register(idle, b"idle")
    pool.free([idle])
    pool.forget([b"owned", b"idle", b"unknown"])
    assert (pool.find(b"owned"), pool.find(b"idle")) == (None, None)
    pool.free([owned])
    assert sorted(pool.allocate(2)) == sorted([owned, idle])


def test_reset_forgets_all_content_and_needs_all_blocks_free():
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.register(block, b"x")
    with pytest.raises(AssertionError, match="that requests use"):
        pool.reset()
    pool.free([block])
    pool.reset()
    assert pool.find(b"x") is None
    assert pool.num_free == 2
    assert len(set(pool.allocate(2))) == 2


class Pools(RuleBasedStateMachine):
    """A pool against a model of it: owners of each block, and what each block holds."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(7)
        self.owners = dict.fromkeys(range(1, 7), 0)
        self.content = {}

    @rule(count=st.integers(0, 3))
    def allocate(self, count):
        if count > self.pool.num_free:
            return
        kept = {block for block in self.content if not self.owners[block]}
        plain = self.pool.num_free - len(kept)
        given = self.pool.allocate(count)
        assert all(not self.owners[block] for block in given)
        assert len(kept & set(given)) == max(0, count - plain), "content is evicted before plain blocks are used up"
        for block in given:
            self.owners[block] = 1
            self.content.pop(block, None)

    @precondition(lambda self: any(self.owners.values()))
    @rule(data=st.data())
    def free(self, data):
        block = data.draw(st.sampled_from(sorted(b for b, n in self.owners.items() if n)))
        self.pool.free([block])
        self.owners[block] -= 1

    @precondition(lambda self: any(self.owners.values()))
    @rule(data=st.data(), name=st.integers(0, 5))
    def register(self, data, name):
        block = data.draw(st.sampled_from(sorted(b for b, n in self.owners.items() if n)))
        self.pool.register(block, bytes([name]))
        if block not in self.content and name not in self.content.values():
            self.content[block] = name

    @rule(name=st.integers(0, 5))
    def share(self, name):
        block = self.pool.find(bytes([name]))
        if block is not None:
            self.pool.share([block])
            self.owners[block] += 1

    @precondition(lambda self: not any(self.owners.values()))
    @rule()
    def reset(self):
        self.pool.reset()
        self.content.clear()

    @invariant()
    def agrees(self):
        assert self.pool.num_free == sum(1 for count in self.owners.values() if not count)
        found = {name: self.pool.find(bytes([name])) for name in range(6)}
        assert {block: name for name, block in found.items() if block is not None} == self.content


TestPools = Pools.TestCase
TestPools.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
