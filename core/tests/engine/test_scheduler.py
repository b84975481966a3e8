"""The scheduler's rules, one example each, on a device in plain Python."""

from __future__ import annotations

import gc
import sys

import pytest

from vllm_core.errors import RequestError

# -- ends


def test_a_stop_token_ends_the_sequence_and_is_named(fake):
    stop = fake.expected(fake.request(max_tokens=3), 64)[0][2]
    request = fake.request(max_tokens=10, stops=[stop])
    engine = fake.engine([fake.group()])
    engine.add(request)
    engine.run()
    assert engine.ends["a"].finish_reason == "stop"
    assert engine.ends["a"].stop_reason == stop
    assert engine.tokens["a"][-1] == stop
    assert stop not in engine.tokens["a"][:-1]


def test_stop_tokens_do_not_end_the_sequence_before_min_tokens(fake):
    request = fake.request(max_tokens=12, min_tokens=5, stops=range(6))
    engine = fake.engine([fake.group()])
    engine.add(request)
    engine.run()
    assert engine.tokens["a"][:5] == [6] * 5
    assert engine.tokens["a"] == fake.expected(request, 64)[0]


def test_max_tokens_ends_with_length(fake):
    engine = fake.engine([fake.group()])
    engine.add(fake.request("one", max_tokens=1), fake.request("four", max_tokens=4))
    engine.run()
    assert {name: len(tokens) for name, tokens in engine.tokens.items()} == {"one": 1, "four": 4}
    assert {end.finish_reason for end in engine.ends.values()} == {"length"}


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_context_ends_a_sequence_and_no_step_computes_past_it(fake, depth):
    engine = fake.engine([fake.group()], max_model_len=12, depth=depth, prefix_caching=False)
    engine.add(fake.request("a", 11, max_tokens=1), fake.request("b", 9, max_tokens=100))
    engine.run()
    assert (len(engine.tokens["a"]), len(engine.tokens["b"])) == (1, 3)
    computed = sum(fake.counts(step).get("b", 0) for step in engine.steps)
    assert computed == 11, "the last token is never computed"


def test_a_stop_drops_what_was_scheduled_beyond_it(fake):
    stop = fake.expected(fake.request(max_tokens=3), 64)[0][0]
    engine = fake.engine([fake.group()], depth=3)
    engine.add(fake.request(max_tokens=10, stops=[stop]))
    engine.run()
    assert engine.tokens["a"] == [stop]
    assert len(engine.steps) == 3


@pytest.mark.parametrize("depth", [1, 2])
def test_logits_that_are_not_finite_fail_their_request_alone(fake, depth):
    engine = fake.engine([fake.group()], depth=depth)
    engine.add(fake.request("good", 5), fake.request("bad", [2, 2, 2]), fake.request("fine", [4, 4]))
    engine.device.nonfinite.add("bad")
    engine.run()
    assert engine.ends["bad"].finish_reason == "error"
    assert "not finite" in engine.ends["bad"].error
    assert engine.tokens["bad"] == []
    assert engine.tokens["good"] == fake.expected(fake.request("good", 5), 64)[0]
    assert engine.tokens["fine"] == fake.expected(fake.request("fine", [4, 4]), 64)[0]


def test_a_request_that_failed_leaves_nothing_in_the_prefix_cache(fake):
    engine = fake.engine([fake.group()])
    engine.device.nonfinite.add("bad")
    engine.add(fake.request("bad", 9))
    engine.run()
    engine.add(fake.request("next", 9))
    engine.run()
    assert engine.scheduler.stats().prefix_hits == 0


# -- log-probabilities


@pytest.mark.parametrize("threshold", [0, 1, 3])
def test_prompt_logprobs_come_once_with_the_first_token_whatever_the_chunks(fake, threshold):
    engine = fake.engine([fake.group()], long_prefill_token_threshold=threshold)
    engine.add(fake.request("a", 10, prompt_logprobs=2), fake.request("b", 7))
    engine.run()
    given = [u.prompt_logprobs for u in engine.updates["a"]]
    prompt = [i % fake.vocab for i in range(10)]
    assert [entries is None for entries in given] == [False, True, True, True]
    assert given[0][0] is None
    assert [e.token for e in given[0][1:]] == prompt[1:]
    assert [e.logprob for e in given[0][1:]] == [fake.logprob(prompt[:i], prompt[i]) for i in range(1, 10)]
    assert all(e.top_ids == [0, 1] and e.top == [0.0, -1.0] for e in given[0][1:])
    assert all(u.prompt_logprobs is None for u in engine.updates["b"])


def test_prompt_logprobs_of_one_token_are_a_none(fake):
    engine = fake.engine([fake.group()])
    engine.add(fake.request("a", [3], prompt_logprobs=0))
    engine.run()
    assert engine.updates["a"][0].prompt_logprobs == [None]


def test_prompt_logprobs_are_not_taken_from_the_prefix_cache(fake):
    engine = fake.engine([fake.group()])
    engine.add(fake.request("a", 9))
    engine.run()
    engine.add(fake.request("b", 9, prompt_logprobs=0))
    engine.run()
    assert len(engine.updates["b"][0].prompt_logprobs) == 9
    assert engine.updates["b"][0].num_cached_tokens == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_preemption_after_their_delivery_leaves_prompt_logprobs_as_they_were(fake, depth):
    engine = fake.engine([fake.group(7, size=2)], depth=depth, prefix_caching=False)
    engine.add(fake.request("first", 3, max_tokens=9), fake.request("late", 5, max_tokens=6, prompt_logprobs=0))
    engine.run()
    assert engine.scheduler.stats().preemptions > 0
    given = [u.prompt_logprobs for u in engine.updates["late"] if u.prompt_logprobs is not None]
    assert [len(entries) for entries in given] == [5]


def test_logprobs_come_with_each_row_that_asks_and_with_as_many_as_it_asks_for(fake):
    engine = fake.engine([fake.group()])
    requests = [fake.request("a", 5, logprobs=3), fake.request("b", 4), fake.request("c", 3, logprobs=0)]
    engine.add(*requests)
    engine.run()
    for name, k in (("a", 3), ("c", 0)):
        known = [i % fake.vocab for i in range(5 if name == "a" else 3)]
        for update in engine.updates[name]:
            (entry,) = update.logprobs
            assert [entry.token] == update.token_ids
            assert entry.logprob == fake.logprob(known, entry.token)
            assert entry.rank == entry.token + 1
            assert entry.top_ids == list(range(k))
            known += update.token_ids
    assert all(update.logprobs is None for update in engine.updates["b"])


# -- pooling


@pytest.mark.parametrize("groups", [0, 1])
def test_pooling_computes_whole_prompts_and_ends_with_a_vector(fake, groups):
    engine = fake.engine([fake.group()] * groups, pooling_whole_prompt=True, max_num_batched_tokens=10, prefix_caching=False)
    engine.add(*(fake.pooling(name, length) for name, length in (("a", 6), ("b", 4), ("c", 10), ("d", 1))))
    engine.run()
    assert [fake.counts(step) for step in engine.steps] == [{"a": 6, "b": 4}, {"c": 10}, {"d": 1}]
    assert {name: end.pooled[1] for name, end in engine.ends.items()} == {"a": 6.0, "b": 4.0, "c": 10.0, "d": 1.0}
    assert {end.finish_reason for end in engine.ends.values()} == {"stop"}
    assert all(step.key.tail == "pool" and step.key.features == 0 for step in engine.steps)


def test_a_pooled_vector_that_is_not_finite_fails_its_request_alone(fake):
    engine = fake.engine([], pooling_whole_prompt=True)
    engine.device.nonfinite.add("bad")
    engine.add(fake.pooling("good", 3), fake.pooling("bad", 4))
    engine.run()
    assert (engine.ends["good"].finish_reason, engine.ends["bad"].finish_reason) == ("stop", "error")
    assert engine.ends["bad"].pooled is None
    assert "not finite" in engine.ends["bad"].error


# -- abort


def test_abort_of_a_waiting_request_lets_the_next_one_in(fake):
    engine = fake.engine([fake.group()], max_num_seqs=1)
    engine.add(fake.request("a"), fake.request("b"), fake.request("c"))
    engine.step()
    engine.abort("b")
    assert engine.scheduler.num_waiting == 1
    engine.run()
    assert engine.ends["b"].finish_reason == "abort"
    assert engine.tokens["b"] == []
    assert "b" not in {name for step in engine.steps for name in engine.names(step)}


def test_abort_of_a_running_request_frees_its_slot_and_blocks_at_once(fake):
    engine = fake.engine([fake.group()], max_num_seqs=1)
    engine.add(fake.request("a", max_tokens=50), fake.request("b"))
    engine.step()
    engine.abort("a")
    assert engine.scheduler.stats().kv_usage == 0
    assert engine.names(engine.launch()) == ["b"]
    engine.run()


def test_abort_in_flight_keeps_the_blocks_until_the_step_is_read(fake):
    engine = fake.engine([fake.group()], max_num_seqs=1, depth=2)
    engine.add(fake.request("a", max_tokens=50), fake.request("b"))
    engine.launch()
    engine.launch()
    engine.abort("a")
    assert engine.scheduler.stats().kv_usage > 0
    assert engine.launch() is None, "the slot may still be touched"
    assert engine.read() == []
    assert engine.scheduler.stats().kv_usage > 0
    assert engine.read() == []
    assert engine.scheduler.stats().kv_usage == 0
    engine.run()
    assert engine.tokens["a"] == []
    assert engine.ends["b"].finish_reason == "length"


@pytest.mark.parametrize("depth", [1, 2])
def test_abort_of_a_preempted_request_ends_it(fake, depth):
    engine = fake.engine([fake.group(7, size=2)], depth=depth)
    engine.add(fake.request("a", 3, max_tokens=9), fake.request("b", 5, max_tokens=6))
    while not engine.scheduler.stats().preemptions:
        engine.step()
    engine.abort("b")
    engine.run()
    assert engine.ends["b"].finish_reason == "abort"
    assert engine.tokens["a"] == fake.expected(fake.request("a", 3, max_tokens=9), 64)[0]


def test_abort_passes_over_unknown_ids_and_repeated_ones(fake):
    engine = fake.engine([fake.group()])
    engine.add(fake.request("a"))
    engine.abort("a", "nobody", "a")
    engine.abort("a")
    assert engine.scheduler.stats().finished == {"abort": 1}
    assert not engine.scheduler.has_work


def test_an_id_may_come_again_while_its_last_step_is_in_flight(fake):
    engine = fake.engine([fake.group()], depth=2)
    engine.add(fake.request("a", 5, max_tokens=20))
    engine.launch()
    engine.abort("a")
    del engine.ends["a"]
    engine.add(fake.request("a", 6))
    engine.run()
    assert engine.tokens["a"] == fake.expected(fake.request("a", 6), 64)[0]


def test_fail_all_ends_every_request_with_the_reason(fake):
    engine = fake.engine([fake.group()], max_num_seqs=1)
    engine.add(fake.request("a"), fake.request("b"))
    engine.step()
    updates = engine.scheduler.fail_all("the device is gone")
    assert [(u.request_id, u.finish_reason, u.error) for u in updates] == [
        ("a", "error", "the device is gone"),
        ("b", "error", "the device is gone"),
    ]
    assert not engine.scheduler.has_work
    assert engine.scheduler.stats().kv_usage == 0


# -- refusals


@pytest.mark.parametrize(
    ("request_of", "options", "what"),
    [
        (lambda fake: fake.request("x", 64), {}, "context"),
        (lambda fake: fake.request("x", []), {}, "context"),
        (lambda fake: fake.pooling("x", 65), {"pooling_whole_prompt": True}, "context"),
        (lambda fake: fake.request("x", 17), {"chunked_prefill": False}, "step"),
        (lambda fake: fake.pooling("x", 17), {"pooling_whole_prompt": True}, "step"),
        (lambda fake: fake.request("x", 20, max_tokens=30), {}, "KV cache"),
        (lambda fake: fake.request("here", 3), {}, "id"),
    ],
)
def test_what_can_never_run_is_refused_with_four_parts_and_leaves_nothing(fake, request_of, options, what):
    engine = fake.engine([fake.group(10, size=4)], **options)
    other = fake.pooling("here", 3) if "pooling_whole_prompt" in options else fake.request("here", 3)
    engine.add(other)
    with pytest.raises(RequestError, match=what) as error:
        engine.scheduler.add(request_of(fake))
    assert all((error.value.what, error.value.on, error.value.found, error.value.expected, error.value.fix))
    assert engine.scheduler.num_waiting == 1
    engine.run()


@pytest.mark.parametrize("first", ["request", "pooling"])
def test_one_engine_does_not_mix_sampling_and_pooling(fake, first):
    engine = fake.engine([fake.group()], pooling_whole_prompt=first == "pooling")
    kinds = {"request": fake.request, "pooling": fake.pooling}
    engine.add(kinds.pop(first)("here", 3))
    (other,) = kinds.values()
    with pytest.raises(RequestError, match="generates or pools"):
        engine.scheduler.add(other("x", 3))
    engine.run()


def test_the_longest_request_that_fits_is_accepted(fake):
    engine = fake.engine([fake.group(10, size=4)], max_model_len=36)
    engine.add(fake.request("a", 35, max_tokens=100))
    engine.run()
    assert len(engine.tokens["a"]) == 1


# -- counters, times, cost


def test_ends_are_counted_by_reason(fake):
    engine = fake.engine([fake.group()])
    engine.device.nonfinite.add("bad")
    engine.add(fake.request("a"), fake.request("b"), fake.request("bad"), fake.request("c", stops=range(7)), fake.request("d"))
    engine.abort("d")
    engine.run()
    assert engine.scheduler.stats().finished == {"length": 2, "stop": 1, "error": 1, "abort": 1}


def test_times_are_of_queue_prefill_and_decode(fake):
    now = [0.0]
    engine = fake.engine([fake.group()], clock=lambda: now[0], max_num_batched_tokens=5)
    engine.add(fake.request("a", 10, max_tokens=3))
    for moment in (2.0, 3.0, 7.0, 8.0):
        now[0] = moment
        engine.launch()
        now[0] += 0.5
        engine.read()
    end = engine.ends["a"]
    assert (end.queue_s, end.prefill_s, end.decode_s) == (2.0, 1.5, 5.0)


def test_a_request_that_never_ran_spent_its_time_in_the_queue(fake):
    now = [1.0]
    engine = fake.engine([fake.group()], clock=lambda: now[0])
    engine.add(fake.request("a"))
    now[0] = 4.0
    engine.abort("a")
    end = engine.ends["a"]
    assert (end.queue_s, end.prefill_s, end.decode_s) == (3.0, 0.0, 0.0)


def test_a_clock_that_starts_at_zero_counts_a_request_once(fake):
    engine = fake.engine([fake.group(7, size=2)], clock=lambda: 0.0)
    engine.add(fake.request("a", [1] * 3, max_tokens=9), fake.request("b", [2] * 5, max_tokens=6))
    engine.run()
    assert engine.scheduler.stats().preemptions > 0
    assert engine.scheduler.stats().prompt_tokens == 8


@pytest.mark.parametrize("max_num_seqs", [1, 2])
def test_a_step_costs_the_same_whatever_the_number_waiting(fake, max_num_seqs):
    """Calls, not seconds: with all slots taken, and with one that is free but no blocks to go with it."""

    def calls(waiting):
        engine = fake.engine([fake.group(4, size=4)], max_num_seqs=max_num_seqs, prefix_caching=False)
        engine.add(fake.request("running", 7, max_tokens=5))
        engine.launch()
        engine.read()
        engine.add(*(fake.request(f"r{i}", 5, max_tokens=7) for i in range(waiting)))
        count = 0

        def profile(frame, event, argument):
            nonlocal count
            count += event in {"call", "c_call"}

        before = sys.getprofile()
        gc.collect()
        gc.disable()  # a collection may call back whoever asked for that, in one count and not in the other
        sys.setprofile(profile)
        try:
            step = engine.scheduler.schedule()
        finally:
            sys.setprofile(before)
            gc.enable()
        assert engine.names(step) == ["running"]
        return count

    assert calls(2000) == calls(2)
