"""Who runs when, and on which blocks: preemption, chunks, prefix cache and windows, one example each."""

from __future__ import annotations

import pytest

# -- preemption and order


def test_preemption_takes_the_last_in_order_which_goes_back_to_its_place(fake):
    engine = fake.engine([fake.group(9, size=2)], max_num_seqs=3, prefix_caching=False)
    requests = [fake.request(name, [i] * 4, max_tokens=9) for i, name in enumerate("abcd")]
    engine.add(*requests)
    seen = []
    while len(engine.ends) < 4:
        seen.append(engine.names(engine.launch()))
        engine.read()
    assert seen[0] == ["a", "b", "c"]
    after = seen[next(i for i, names in enumerate(seen) if len(names) < 3)]
    assert after == ["a", "b"], "c came last, so c gives way"
    first_rows = list(dict.fromkeys(name for names in seen for name in names))
    assert first_rows == ["a", "b", "c", "d"], "and comes again before d"
    assert engine.scheduler.stats().preemptions > 0
    engine.run()
    assert all(engine.tokens[r.request_id] == fake.expected(r, 64)[0] for r in requests)


def test_with_priority_the_less_urgent_one_is_preempted(fake):
    engine = fake.engine([fake.group(6, size=2)], policy="priority", prefix_caching=False)
    engine.add(fake.request("late", [1] * 3, max_tokens=6, priority=1))
    engine.step()
    engine.add(fake.request("urgent", [2] * 3, max_tokens=6, priority=0))
    while not engine.scheduler.stats().preemptions:
        engine.step()
    engine.step()
    assert engine.names(engine.steps[-1]) == ["urgent"]
    engine.run()


@pytest.mark.parametrize(("policy", "order"), [("fcfs", "abcd"), ("priority", "dbca")])
def test_who_waits_comes_in_by_arrival_or_by_priority_then_arrival(fake, policy, order):
    engine = fake.engine([fake.group()], policy=policy, max_num_seqs=1)
    for name, priority in zip("abcd", (2, 1, 1, -1), strict=True):
        engine.add(fake.request(name, priority=priority, max_tokens=1))
    engine.run()
    assert [name for step in engine.steps for name in engine.names(step)] == list(order)


def test_a_preempted_request_with_steps_in_flight_loses_no_token(fake):
    engine = fake.engine([fake.group(7, size=2)], depth=3, prefix_caching=False)
    requests = [fake.request("a", [1] * 3, max_tokens=9), fake.request("b", [2] * 5, max_tokens=7)]
    engine.add(*requests)
    engine.run()
    assert engine.scheduler.stats().preemptions >= 1
    assert all(engine.tokens[r.request_id] == fake.expected(r, 64)[0] for r in requests)


def test_blocks_that_come_back_with_a_step_in_flight_are_waited_for(fake):
    """One victim suffices, though its blocks come late."""
    engine = fake.engine([fake.group(10, size=2)], depth=3, max_num_seqs=3, prefix_caching=False)
    engine.add(*(fake.request(name, [i] * 5, max_tokens=6) for i, name in enumerate("abc")))
    while not engine.scheduler.stats().preemptions:
        engine.launch()
    for _ in range(3):
        engine.launch()
    assert engine.scheduler.stats().preemptions == 1
    engine.run()


def test_nobody_overtakes_a_preempted_request_whose_steps_are_in_flight(fake):
    """The end of b brings blocks and a slot before c, which lost its own, is back in the queue."""
    engine = fake.engine([fake.group(10, size=2)], depth=3, max_num_seqs=3, prefix_caching=False)
    for i, name in enumerate("abcd"):
        engine.add(fake.request(name, [i] * (1 if name == "d" else 5), max_tokens=1 if name == "b" else 6))
    while not engine.scheduler.stats().preemptions:
        engine.advance()
    assert [engine.names(step) for step in engine.steps] == [["a", "b", "c"], ["a", "c"]]
    engine.run()
    again = [engine.names(step) for step in engine.steps[2:]]
    assert next(i for i, names in enumerate(again) if "c" in names) <= next(i for i, names in enumerate(again) if "d" in names)


def test_a_preempted_request_is_counted_as_waiting_while_its_steps_are_in_flight(fake):
    engine = fake.engine([fake.group(7, size=2)], depth=2, prefix_caching=False)
    engine.add(fake.request("a", [1] * 3, max_tokens=9), fake.request("b", [2] * 5, max_tokens=6))
    while not engine.scheduler.stats().preemptions:
        engine.advance()
    stats = engine.scheduler.stats()
    assert engine.in_flight
    assert (stats.running, stats.waiting) == (1, 1)
    engine.abort("b")
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (1, 0)
    engine.run()


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("caching", [True, False])
def test_a_window_as_large_as_its_pool_waits_for_its_own_steps_instead_of_starting_again(fake, depth, caching):
    engine = fake.engine([fake.group(8, size=1, window=1)], depth=depth, max_num_batched_tokens=5, prefix_caching=caching)
    request = fake.request("a", 30, max_tokens=8)
    engine.add(request)
    engine.run(max_steps=60)
    assert engine.scheduler.stats().preemptions == 0
    assert engine.tokens["a"] == fake.expected(request, 64)[0]


# -- chunks


def test_prompts_are_computed_in_chunks_beside_decoding(fake):
    engine = fake.engine([fake.group()], max_num_batched_tokens=4, max_num_seqs=2)
    engine.add(fake.request("a", 3, max_tokens=6), fake.request("b", 9, max_tokens=2))
    engine.run()
    assert [fake.counts(step) for step in engine.steps[:5]] == [
        {"a": 3, "b": 1},
        *[{"a": 1, "b": 3}] * 2,
        {"a": 1, "b": 2},
        {"a": 1, "b": 1},
    ]
    assert [[sampled for *_, sampled in step.rows] for step in engine.steps[:4]] == [[True, False]] * 3 + [[True, True]]


def test_without_chunks_a_prompt_waits_until_it_fits_whole(fake):
    engine = fake.engine([fake.group()], max_num_batched_tokens=8, chunked_prefill=False)
    engine.add(fake.request("a", [1] * 5, max_tokens=3), fake.request("b", [2] * 8, max_tokens=2))
    engine.run()
    assert [fake.counts(step) for step in engine.steps] == [{"a": 5}, {"a": 1}, {"a": 1}, {"b": 8}, {"b": 1}]


def test_without_chunks_a_preempted_sequence_longer_than_a_step_comes_back_in_pieces(fake):
    engine = fake.engine([fake.group(8, size=2)], max_num_batched_tokens=6, chunked_prefill=False, prefix_caching=False)
    requests = [fake.request("a", [1] * 4, max_tokens=9), fake.request("b", [2] * 5, max_tokens=8)]
    engine.add(*requests)
    engine.run(max_steps=80)
    assert engine.scheduler.stats().preemptions > 0
    assert all(engine.tokens[r.request_id] == fake.expected(r, 64)[0] for r in requests)


def test_the_threshold_of_long_prompts_leaves_room_for_others(fake):
    engine = fake.engine([fake.group()], long_prefill_token_threshold=3)
    engine.add(fake.request("a", 8), fake.request("b", 2))
    engine.run()
    assert fake.counts(engine.steps[0]) == {"a": 3, "b": 2}
    assert fake.counts(engine.steps[1]) == {"a": 3, "b": 1}


# -- prefix cache


def test_the_second_of_equal_prompts_computes_what_no_block_holds(fake):
    engine = fake.engine([fake.group(size=4)])
    engine.add(fake.request("a", 10))
    engine.run()
    engine.add(fake.request("b", 10))
    engine.run()
    assert fake.counts(engine.steps[-4]) == {"b": 2}
    assert [u.num_cached_tokens for u in engine.updates["b"]] == [8, 0, 0, 0]


@pytest.mark.parametrize("length", [4, 8])
def test_a_prompt_that_is_cached_whole_keeps_one_block_to_compute(fake, length):
    engine = fake.engine([fake.group(size=4)])
    engine.add(fake.request("a", length))
    engine.run()
    engine.add(fake.request("b", length))
    engine.run()
    assert fake.counts(engine.steps[-4]) == {"b": 4}
    assert engine.tokens["b"] == engine.tokens["a"]


@pytest.mark.parametrize("depth", [1, 2])
def test_prompts_that_arrive_together_compute_what_they_share_once(fake, depth):
    engine = fake.engine([fake.group()], max_num_batched_tokens=64, depth=depth)
    shared = [i % fake.vocab for i in range(12)]
    requests = [fake.request(name, [*shared, index], max_tokens=3) for index, name in enumerate("abcd")]
    engine.add(*requests)
    engine.run()
    first = fake.counts(engine.steps[0])
    assert first == {"a": 13, "b": 1, "c": 1, "d": 1}
    assert engine.scheduler.stats().prefix_hits == 3 * 12
    assert engine.tokens == {one.request_id: fake.expected(one, 64)[0] for one in requests}


def test_a_chunk_that_is_in_flight_is_found_by_the_next_step(fake):
    engine = fake.engine([fake.group()], max_num_batched_tokens=8, depth=2)
    engine.add(fake.request("a", 16, max_tokens=1), fake.request("b", 20, max_tokens=1))
    engine.run()
    assert sum(sum(fake.counts(step).values()) for step in engine.steps) == 16 + 4


def test_output_is_found_again_as_the_prefix_of_the_next_turn(fake):
    engine = fake.engine([fake.group(size=2)])
    engine.add(fake.request("a", 5, max_tokens=5))
    engine.run()
    engine.add(fake.request("b", [i % fake.vocab for i in range(5)] + engine.tokens["a"] + [1]))
    engine.run()
    # The last token of an output is never computed, so its block is not there.
    assert engine.updates["b"][0].num_cached_tokens == 8


def test_salts_do_not_share(fake):
    engine = fake.engine([fake.group(size=2)])
    for name, salt in (("a", "x"), ("b", "y"), ("c", "x")):
        engine.add(fake.request(name, 9, salt=salt))
        engine.run()
    assert [engine.updates[name][0].num_cached_tokens for name in "abc"] == [0, 0, 8]


def test_hits_and_queries_are_counted_in_tokens_once_a_request(fake):
    engine = fake.engine([fake.group(size=2)])
    for name in "ab":
        engine.add(fake.request(name, 7))
        engine.run()
    stats = engine.scheduler.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (14, 6)
    assert (stats.prompt_tokens, stats.generation_tokens) == (14, 8)


def test_preemption_does_not_count_a_prompt_again(fake):
    engine = fake.engine([fake.group(7, size=2)])
    engine.add(fake.request("a", [1] * 3, max_tokens=9), fake.request("b", [2] * 5, max_tokens=6))
    engine.run()
    stats = engine.scheduler.stats()
    assert stats.preemptions > 0
    assert (stats.prompt_tokens, stats.prefix_queries, stats.generation_tokens) == (8, 8, 15)


def test_resetting_the_cache_is_refused_while_blocks_are_in_use_and_forgets_all_else(fake):
    engine = fake.engine([fake.group(size=2)])
    engine.add(fake.request("a", 9))
    engine.step()
    assert not engine.scheduler.reset_prefix_cache()
    engine.run()
    assert engine.scheduler.reset_prefix_cache()
    engine.add(fake.request("b", 9))
    engine.run()
    assert engine.updates["b"][0].num_cached_tokens == 0


def test_a_match_that_needs_the_last_blocks_is_admitted_without_evicting_itself(fake):
    engine = fake.engine([fake.group(6, size=2)], max_num_seqs=2)
    engine.add(fake.request("a", 7, max_tokens=2))
    engine.run()
    engine.add(fake.request("b", 7, max_tokens=3))
    engine.run()
    assert engine.updates["b"][0].num_cached_tokens == 6
    assert engine.tokens["b"] == fake.expected(fake.request("b", 7, max_tokens=3), 64)[0]


# -- windows


def test_a_window_group_keeps_no_more_than_its_window_and_a_chunk(fake):
    blocks, size, window, chunk = 41, 2, 6, 4
    engine = fake.engine([fake.group(blocks, size, window)], max_num_batched_tokens=chunk)
    engine.add(fake.request("a", 30, max_tokens=30))
    held = []
    while engine.scheduler.has_work:
        engine.step()
        held.append(round(engine.scheduler.stats().kv_usage * (blocks - 1)))
    assert max(held) <= (window + chunk) // size
    assert max(held[-20:-1]) <= window // size + 1


def test_a_prefix_is_shared_across_groups_as_far_as_each_can_serve_it(fake):
    groups = [fake.group(33, 2, None, 0), fake.group(12, 2, 4, 1)]
    engine = fake.engine(groups, max_num_batched_tokens=8)
    engine.add(fake.request("a", 20, max_tokens=2))
    engine.run()
    engine.add(fake.request("b", [i % fake.vocab for i in range(20)] + [5], max_tokens=3))
    engine.run()
    assert engine.updates["b"][0].num_cached_tokens == 20
    engine.add(fake.request("c", [i % fake.vocab for i in range(8)] + [5], max_tokens=3))
    engine.run()
    assert engine.updates["c"][0].num_cached_tokens in {0, 8}


def test_groups_of_different_block_sizes_run_without_a_prefix_cache(fake):
    engine = fake.engine([fake.group(33, 2, None, 0), fake.group(12, 4, 4, 1)])
    for name in "ab":
        engine.add(fake.request(name, 9))
        engine.run()
    stats = engine.scheduler.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (0, 0)
    assert engine.tokens["a"] == engine.tokens["b"]


def test_a_chunk_of_one_token_is_not_shared_in_its_own_step(fake):
    """The fake device asserts that no row of single queries reads what another one writes."""
    engine = fake.engine([fake.group()], long_prefill_token_threshold=1)
    engine.add(fake.request("a", 9))
    for _ in range(3):
        engine.step()
    engine.add(fake.request("b", 9))
    step = engine.launch()
    assert engine.counts(step) == {"a": 1, "b": 1}
    engine.run()
    assert engine.updates["b"][0].num_cached_tokens == 0
    engine.add(fake.request("c", 9))
    engine.run()
    assert engine.updates["c"][0].num_cached_tokens == 8
