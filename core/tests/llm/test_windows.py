"""Layers that see a window keep the blocks of the window alone, and compute what transformers computes."""

from __future__ import annotations

import pytest

from vllm_core import SamplingParams

WINDOW, BLOCK = 24, 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=70, ignore_eos=True)
PROMPT = [(11 * i + 5) % 250 for i in range(10)]


def window_group(llm):
    """Index of the group with a window."""
    return next(g.spec.index for g in llm.plan.kv_groups if g.spec.window == WINDOW)


def most_held(llm, batch):
    """The most blocks that a request ever held, per group, between steps."""
    most = [0] * len(llm.plan.kv_groups)
    while batch.has_work:
        batch.advance()
        for request in llm._core.scheduler._running:
            held = [sum(1 for block in blocks if block) for blocks in request.blocks]
            most = [max(a, b) for a, b in zip(most, held, strict=True)]
    return most


@pytest.mark.parametrize("chunk", [4, 16, 2048])
def test_tokens_over_the_windows_border(gemma, engines, run, chunk):
    llm = engines(gemma, block_size=BLOCK, max_num_batched_tokens=max(chunk, 16), long_prefill_token_threshold=chunk)
    short, long = PROMPT, [(13 * i + 1) % 250 for i in range(61)]
    expected = [gemma.greedy(short, 40), gemma.greedy(long, 12)]
    params = [GREEDY.replace(max_tokens=40), GREEDY.replace(max_tokens=12)]
    assert run(llm, [short, long], params) == expected


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_long_generation_keeps_the_blocks_of_its_window(gemma, engines, asynchronous):
    llm = engines(gemma, block_size=BLOCK, async_scheduling=asynchronous, enable_prefix_caching=False)
    with llm.open_batch([(PROMPT, GREEDY.replace(max_tokens=200))]) as batch:
        most = most_held(llm, batch)
    index = window_group(llm)
    assert most[1 - index] >= (len(PROMPT) + 200) // BLOCK
    assert most[index] <= -(-WINDOW // BLOCK) + 2, "the window's tokens, a partial block at each end"


def test_the_blocks_behind_a_window_serve_other_requests(gemma, engines, run):
    """Memory for one full context in the window group would not hold four sequences at once."""
    llm = engines(gemma, block_size=BLOCK, max_num_seqs=4, enable_prefix_caching=False)
    pool = llm._core.scheduler._tables.pools[window_group(llm)]
    free = []
    with llm.open_batch([([i, *PROMPT], GREEDY.replace(max_tokens=150)) for i in range(4)]) as batch:
        while batch.has_work:
            batch.advance()
            free.append(pool.num_free)
    assert pool.num_blocks - 1 - min(free) <= 4 * (WINDOW // BLOCK + 2)
    assert pool.num_free == pool.num_blocks - 1


def test_a_cached_prefix_needs_its_window_alone(gemma, engines, run):
    """The second request starts behind the window's border, and its tokens are right."""
    llm = engines(gemma, block_size=BLOCK)
    prompt = [(13 * i + 1) % 250 for i in range(65)]
    expected = [gemma.greedy(prompt, 8)]
    for cached in (0, 64):
        (output,) = llm.generate([prompt], GREEDY.replace(max_tokens=8), use_tqdm=False)
        assert output.num_cached_tokens == cached
        assert [output.outputs[0].token_ids] == expected
