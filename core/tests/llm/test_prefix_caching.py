"""Full blocks of equal beginnings are computed once, counted, kept apart by salt, and forgotten on request."""

from __future__ import annotations

import pytest

from vllm_core import SamplingParams

BLOCK = 16
PROMPT = [(17 * i + 2) % 250 for i in range(50)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def cached(llm, prompt, **options):
    (output,) = llm.generate([prompt], GREEDY, use_tqdm=False, **options)
    return output.num_cached_tokens


def test_a_second_request_reports_what_it_found(llama, engines, run):
    llm = engines(llama)
    assert [cached(llm, PROMPT) for _ in range(2)] == [0, 48]
    assert cached(llm, PROMPT[:48]) == 32, "one token at least is computed"
    assert cached(llm, [*PROMPT[:20], *PROMPT[:20]]) == 16
    assert cached(llm, [249, *PROMPT]) == 0
    stats = llm.get_metrics()
    assert (stats.prefix_queries, stats.prefix_hits) == (50 + 50 + 48 + 40 + 51, 48 + 32 + 16)
    assert run(llm, [PROMPT], GREEDY) == [llama.greedy(PROMPT, 6)]


def test_salts_are_kept_apart(llama, engines):
    llm = engines(llama)
    found = [cached(llm, PROMPT, cache_salt=salt) for salt in ("a", "b", "a", "", "")]
    assert found == [0, 0, 48, 0, 48]


def test_generated_tokens_are_found_by_the_next_turn(llama, engines, run):
    """A conversation: each turn begins with all that was said before."""
    llm = engines(llama)
    tokens = list(PROMPT)
    for _ in range(4):
        (output,) = llm.generate([tokens], GREEDY.replace(max_tokens=20), use_tqdm=False)
        assert output.outputs[0].token_ids == llama.greedy(tokens, 20)
        # The last token of the turn before was sampled and never computed.
        before = len(tokens) - 6
        assert output.num_cached_tokens == (0 if tokens == PROMPT else (before - 1) // BLOCK * BLOCK)
        tokens += [*output.outputs[0].token_ids, 1, 2, 3, 4, 5, 6]


def test_reset_forgets_everything_unless_blocks_are_in_use(llama, engines):
    llm = engines(llama)
    cached(llm, PROMPT)
    stream = llm.stream(PROMPT, GREEDY)
    next(stream)
    assert not llm.reset_prefix_cache()
    stream.close()
    assert llm.reset_prefix_cache()
    assert cached(llm, PROMPT) == 0


def test_without_caching_nothing_is_found(llama, engines, run):
    llm = engines(llama, enable_prefix_caching=False)
    assert [cached(llm, PROMPT) for _ in range(2)] == [0, 0]
    assert llm.get_metrics().prefix_queries == 0
    assert run(llm, [PROMPT], GREEDY) == [llama.greedy(PROMPT, 6)]


@pytest.mark.parametrize("size", [1, 8])
def test_tokens_with_hits_evictions_and_shared_blocks_in_flight(llama, engines, run, size):
    """Few blocks: what is cached is evicted again and again; prompts share beginnings of every length."""
    llm = engines(llama, block_size=size, num_gpu_blocks_override=130 // size, kv_cache_memory_bytes=None, max_model_len=96)
    prompts = [[*PROMPT[: 5 * i + 1], 240 + i] for i in range(9)]
    expected = [llama.greedy(prompt, 6) for prompt in prompts]
    for order in (list(range(9)), [8, 0, 7, 1, 6, 2, 5, 3, 4]):
        assert run(llm, [prompts[i] for i in order], GREEDY) == [expected[i] for i in order]
    assert llm.get_metrics().prefix_hits > 0
    assert llm.get_metrics().kv_usage == 0.0


def test_n_sequences_share_their_prompt(llama, engines):
    llm = engines(llama, max_num_seqs=1)
    llm.generate([PROMPT], GREEDY.replace(n=3, temperature=1.0, seed=0), use_tqdm=False)
    assert llm.get_metrics().prefix_hits == 2 * 48
