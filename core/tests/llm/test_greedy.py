"""Greedy tokens and log-probabilities are those of transformers, however the prompt is cut."""

from __future__ import annotations

import pytest
import torch

from vllm_core import SamplingParams

PROMPT = [(7 * i * i + 3) % 250 for i in range(40)]


@pytest.fixture(scope="module", params=[7, 64])
def chunked(request, llama):
    """Engines whose prompts take several steps, or one."""
    from vllm_core import LLM

    with LLM(
        str(llama.path), dtype="float32", max_model_len=256, max_num_seqs=4, max_num_batched_tokens=request.param,
        kv_cache_memory_bytes=1 << 23,
    ) as llm:  # fmt: skip
        yield llm


def test_greedy_is_transformers_greedy(llama, chunked, one):
    out = one(chunked, PROMPT, temperature=0.0, max_tokens=24, ignore_eos=True)
    assert out.token_ids == llama.greedy(PROMPT, 24)


def test_logprobs_are_the_log_softmax_of_transformers(llama, chunked, one):
    out = one(chunked, PROMPT, temperature=0.0, max_tokens=6, logprobs=4, ignore_eos=True)
    expected = llama.logits([*PROMPT, *out.token_ids])[len(PROMPT) - 1 : -1].log_softmax(1)
    check(out.logprobs, expected, out.token_ids, 4)
    chosen = expected[torch.arange(6), torch.tensor(out.token_ids)]
    assert out.cumulative_logprob == pytest.approx(float(chosen.sum()), abs=1e-3)


def test_prompt_logprobs_are_the_log_softmax_of_transformers(llama, chunked):
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=3, ignore_eos=True)
    (out,) = chunked.generate([PROMPT], params, use_tqdm=False)
    assert out.prompt_logprobs[0] is None
    check(out.prompt_logprobs[1:], llama.logits(PROMPT)[:-1].log_softmax(1), PROMPT[1:], 3)


def test_logprobs_of_zero_are_the_chosen_token_alone(shared, one):
    out = one(shared, PROMPT, temperature=0.0, max_tokens=2, logprobs=0)
    assert [list(entry) for entry in out.logprobs] == [[token] for token in out.token_ids]


def test_logprobs_are_raw_whatever_the_penalties(llama, chunked, one):
    """A token that a bias forces keeps the probability that the model gives it, and its rank."""
    out = one(chunked, PROMPT, temperature=0.0, max_tokens=3, logprobs=2, logit_bias={9: 100.0}, repetition_penalty=1.5)
    assert out.token_ids == [9, 9, 9]
    expected = llama.logits([*PROMPT, 9, 9, 9])[len(PROMPT) - 1 : -1].log_softmax(1)
    check(out.logprobs, expected, [9, 9, 9], 2)
    assert all(entry[9].rank > 1 for entry in out.logprobs)


def test_prompt_logprobs_do_not_depend_on_what_is_cached(llama, engines):
    """They need every position computed, so a cached prefix is not used for them."""
    llm = engines(llama)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    outputs = [llm.generate([PROMPT], params, use_tqdm=False)[0] for _ in range(2)]
    assert outputs[0].prompt_logprobs == outputs[1].prompt_logprobs
    assert outputs[1].num_cached_tokens == 0


def test_requests_that_want_logprobs_share_a_step_with_those_that_do_not(shared, one):
    params = [
        SamplingParams(temperature=0.0, max_tokens=3, logprobs=k, prompt_logprobs=p)
        for k, p in ((None, None), (5, 2), (2, None))
    ]
    outputs = shared.generate([PROMPT, PROMPT[:9], PROMPT[:5]], params, use_tqdm=False)
    assert outputs[0].outputs[0].logprobs is None
    assert outputs[0].prompt_logprobs is None
    alone = shared.generate([PROMPT[:9]], params[1], use_tqdm=False)[0]
    assert outputs[1].prompt_logprobs == alone.prompt_logprobs
    assert outputs[1].outputs[0].logprobs == alone.outputs[0].logprobs
    assert outputs[2].outputs[0].logprobs == one(shared, PROMPT[:5], temperature=0.0, max_tokens=3, logprobs=2).logprobs


def test_the_decoded_text_comes_with_each_logprob(shared, one):
    out = one(shared, "abc", temperature=0.0, max_tokens=2, logprobs=1)
    for token, entry in zip(out.token_ids, out.logprobs, strict=True):
        assert entry[token].decoded_token == shared.get_tokenizer().token_text(token)


def check(entries, expected, tokens, k):
    """Each entry against one row of log-probabilities: the chosen token, its rank, the k most likely."""
    assert len(entries) == len(tokens) == len(expected)
    for entry, row, token in zip(entries, expected, tokens, strict=True):
        assert entry[token].logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert entry[token].rank == int((row > row[token]).sum()) + 1
        top = row.topk(k)
        assert set(entry) == {token, *top.indices.tolist()}
        for rank, (value, index) in enumerate(zip(top.values.tolist(), top.indices.tolist(), strict=True), start=1):
            assert entry[index].logprob == pytest.approx(value, abs=1e-4)
            assert entry[index].rank == rank
