"""The packed difference, word for word as `vllm_core.api.batch` lays it out."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from vllm_core.api import batch
from vllm_core.engine import packing


def sections(packed):
    header = packed[: batch.HEADER_WORDS].tolist()
    at, parts = batch.HEADER_WORDS, []
    for index, width in (
        (batch.H_ADMITTED, batch.ADMIT_WORDS),
        (batch.H_TOKENS, 1),
        (batch.H_BLOCKS, 4),
        (batch.H_EXTRA, 5),
        (batch.H_SCHEDULED, 4),
    ):
        parts.append(packed[at : at + header[index] * width].reshape(-1, width).tolist())
        at += header[index] * width
    assert at == len(packed), "nothing follows the last section"
    return header, *parts


def bits(value):
    return struct.unpack("<i", struct.pack("<f", value))[0]


def first_step(fake, *requests, **options):
    engine = fake.engine([fake.group(33, 4)], **options)
    engine.add(*requests)
    return engine, engine.launch()


def test_two_requests_word_for_word(fake):
    _, step = first_step(fake, fake.request("a", [3, 1, 4, 1, 5]), fake.request("b", [2, 6]))
    header, admits, tokens, blocks, extras, steps = sections(step.delta.packed)
    assert header == [1, 2, 7, 3, 0, 2, 7, 2, 5, 5] + [0] * 6
    assert [tokens[i][0] for i in range(7)] == [3, 1, 4, 1, 5, 2, 6]
    (a, b) = (row[0] for row in steps)
    assert steps == [[a, 5, 1, 0], [b, 2, 1, 0]]
    assert [row[:3] for row in blocks] == [[0, a, 0], [0, a, 1], [0, b, 0]]
    assert len({row[3] for row in blocks} - {batch.NULL_BLOCK}) == 3
    assert extras == []
    for record, slot, length in ((admits[0], a, 5), (admits[1], b, 2)):
        assert record[:4] == [slot, length, 0, length]
        assert record[batch.A_MIN_LEN] == length
        assert record[batch.A_TOP_K : batch.A_FEATURES + 1] == [0] * 7
        assert record[batch.A_TEMPERATURE :] == [0, bits(1.0), 0, bits(1.0), 0, 0, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-38, 9e-6])
def test_a_temperature_that_logits_cannot_be_divided_by_is_greedy(fake, temperature):
    _, step = first_step(fake, fake.request("a", 3, temperature=temperature), fake.request("b", 3, temperature=1e-5))
    _, (a, b), *_ = sections(step.delta.packed)
    assert (a[batch.A_TEMPERATURE], a[batch.A_FEATURES]) == (0, 0)
    assert (b[batch.A_TEMPERATURE], b[batch.A_FEATURES]) == (bits(1e-5), batch.F_RANDOM)


def test_a_step_without_news_is_a_header_and_rows(fake):
    engine, _ = first_step(fake, fake.request("a", 5), fake.request("b", 2))
    engine.read()
    header, admits, tokens, blocks, extras, steps = sections(engine.launch().delta.packed)
    assert header == [1, 0, 0, 0, 0, 2, 2, 2, 1, 6] + [0] * 6
    assert (admits, tokens, blocks, extras) == ([], [], [], [])
    assert [row[1:] for row in steps] == [[1, 1, 0], [1, 1, 0]]


def test_many_rows_are_laid_out_as_few_are(fake, monkeypatch):
    engine, _ = first_step(fake, *(fake.request(f"{i}", 1) for i in range(5)))
    engine.read()
    few = engine.launch().delta.packed
    engine.read()
    monkeypatch.setattr(packing, "FEW_ROWS", 0)
    many = engine.launch().delta.packed
    assert many[batch.H_MAX_SEQ] == few[batch.H_MAX_SEQ] + 1, "one token later"
    many[batch.H_MAX_SEQ] -= 1
    assert many.tolist() == few.tolist()
    assert many.dtype == few.dtype


def test_a_new_block_is_one_row(fake):
    engine, _ = first_step(fake, fake.request("a", 4))
    engine.read()
    _, _, _, blocks, _, steps = sections(engine.launch().delta.packed)
    assert [row[:3] for row in blocks] == [[0, steps[0][0], 1]]


def test_chunks_that_sample_nothing_say_so(fake):
    engine, step = first_step(fake, fake.request("a", 10), fake.request("b", 3), long_prefill_token_threshold=4)
    header, *_, steps = sections(step.delta.packed)
    assert [row[1:3] for row in steps] == [[4, 0], [3, 1]]
    assert header[batch.H_NUM_SAMPLED] == 1
    assert step.num_sampled == 1
    engine.read()
    header, *_, steps = sections(engine.launch().delta.packed)
    assert [row[1:3] for row in steps] == [[4, 0], [1, 1]]
    assert (header[batch.H_MAX_QUERY], header[batch.H_MAX_SEQ], header[batch.H_NUM_TOKENS]) == (4, 8, 5)


def test_the_whole_history_comes_with_a_cached_prefix(fake):
    engine, _ = first_step(fake, fake.request("a", 9))
    engine.run()
    engine.add(fake.request("b", 10))
    header, admits, tokens, blocks, *_ = sections(engine.launch().delta.packed)
    assert admits[0][batch.A_NUM_KNOWN : batch.A_PROMPT_LEN + 1] == [10, 8, 10]
    assert len(tokens) == 10
    assert [row[2] for row in blocks] == [0, 1, 2]
    assert header[batch.H_MAX_SEQ] == 10


def test_a_preempted_request_comes_back_with_its_output(fake):
    engine = fake.engine([fake.group(7, size=2)], prefix_caching=False)
    engine.add(fake.request("a", [1] * 3, max_tokens=9), fake.request("b", [2] * 5, max_tokens=6))
    admits = []
    while not engine.ends:
        admits += sections(engine.launch().delta.packed)[1]
        engine.read()
    engine.step()
    admits += sections(engine.steps[-1].delta.packed)[1]
    last = admits[-1]
    assert last[batch.A_PROMPT_LEN] == 5
    assert last[batch.A_NUM_KNOWN] > 5
    assert last[batch.A_MIN_LEN] == 5


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1, 2**32, 2**63 + 5, 2**64 - 1, -1, -(2**63)])
def test_seeds_have_64_bits(fake, seed):
    _, step = first_step(fake, fake.request("a", seed=seed))
    (record,) = sections(step.delta.packed)[1]
    low, high = np.array(record[batch.A_SEED_LOW : batch.A_SEED_HIGH + 1], dtype=np.int32).view(np.uint32).tolist()
    assert low | high << 32 == seed % 2**64


def test_sampling_values_travel_as_bits(fake):
    request = fake.request(
        temperature=0.7,
        top_p=0.9,
        min_p=0.05,
        top_k=40,
        repetition_penalty=1.2,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        min_tokens=2,
    )
    _, step = first_step(fake, request)
    (record,) = sections(step.delta.packed)[1]
    assert record[batch.A_TEMPERATURE : batch.A_FREQUENCY + 1] == [bits(v) for v in (0.7, 0.9, 0.05, 1.2, -0.5, 0.25)]
    assert record[batch.A_TOP_K] == 40
    assert record[batch.A_MIN_LEN] == 7
    assert record[batch.A_FEATURES] == batch.F_RANDOM | batch.F_FILTER | batch.F_PENALTIES | batch.F_MIN_LEN


def test_a_top_k_of_minus_one_is_off(fake):
    _, step = first_step(fake, fake.request(top_k=-1))
    assert sections(step.delta.packed)[1][0][batch.A_TOP_K] == 0


def test_bias_stops_and_bad_words_are_extras(fake):
    request = fake.request(
        logit_bias={3: 1.5, 5: -100.0}, stops=[6, 2], min_tokens=1, bad_words=[[4], [1, 2, 3]], bad_words_token_ids=[[4]]
    )
    _, step = first_step(fake, fake.request("plain", 2), request)
    header, admits, _, _, extras, steps = sections(step.delta.packed)
    slot = steps[1][0]
    # Bad words count int32 words of the ragged record: a length and the tokens of each.
    assert admits[1][batch.A_NUM_STOP : batch.A_NUM_BAD + 1] == [2, 2, 6]
    assert admits[0][batch.A_NUM_STOP : batch.A_NUM_BAD + 1] == [0, 0, 0]
    assert extras == [
        [batch.E_BIAS, slot, 0, 3, bits(1.5)],
        [batch.E_BIAS, slot, 1, 5, bits(-100.0)],
        [batch.E_STOP, slot, 0, 6, 0],
        [batch.E_STOP, slot, 1, 2, 0],
        *([batch.E_BAD_WORD, slot, at, value, 0] for at, value in enumerate([1, 4, 3, 1, 2, 3])),
    ]
    assert header[batch.H_EXTRA] == 10


def test_stop_tokens_travel_only_where_the_device_must_suppress_them(fake):
    _, step = first_step(fake, fake.request(stops=[6, 2]))
    _, admits, _, _, extras, _ = sections(step.delta.packed)
    assert admits[0][batch.A_NUM_STOP] == 0
    assert extras == []


def test_bad_words_without_tokens_of_their_own_set_no_feature(fake):
    """Words may turn out empty when they are encoded; then there is nothing to apply."""
    _, step = first_step(fake, fake.request(bad_words_token_ids=[[4]]))
    assert sections(step.delta.packed)[1][0][batch.A_FEATURES] & batch.F_BAD_WORDS == 0


def test_the_key_has_the_features_of_sampled_rows_and_prompt_logprobs_of_all(fake):
    greedy, varied = fake.request("a", 2), fake.request("b", 12, temperature=1.0, logprobs=2, prompt_logprobs=5)
    engine, step = first_step(fake, greedy, varied, long_prefill_token_threshold=8)
    assert step.key.features & ~batch.F_PROMPT_LOGPROBS == 0
    assert step.key.features & batch.F_PROMPT_LOGPROBS
    assert step.delta.num_logprobs == 5
    engine.read()
    step = engine.launch()
    assert step.key.features == batch.F_RANDOM | batch.F_LOGPROBS | batch.F_PROMPT_LOGPROBS
    engine.read()
    step = engine.launch()
    assert step.key.features == batch.F_RANDOM | batch.F_LOGPROBS, "the prompt is done"
    assert (step.key.slots, step.key.tokens, step.key.tokens_per_slot, step.key.tail) == (2, 2, 1, "sample")


def test_pooling_packs_no_sampling_values(fake):
    engine = fake.engine([fake.group()], pooling_whole_prompt=True)
    engine.add(fake.pooling("a", 3))
    header, admits, *_, steps = sections(engine.launch().delta.packed)
    assert admits[0][1:4] == [3, 0, 3]
    assert admits[0][batch.A_MIN_LEN :] == [0] * 20
    assert (header[batch.H_NUM_SAMPLED], steps[0][1:]) == (0, [3, 0, 0])
