"""Greedy tokens equal those of transformers in float32, however requests are batched, chunked, cached or preempted."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_core import LLM, SamplingParams
from vllm_core.config import ModelConfig
from vllm_core.loader.source import open_model

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
Engine = Callable[..., LLM]


def run(llm: LLM, reference: Any, order: list[int]) -> None:
    outputs = llm.generate([reference.prompts[i] for i in order], GREEDY, use_tqdm=False)
    reference.compare_all(outputs, order)


def test_the_tokenizer_gives_the_references_ids(reference: tuple[Any, Path]) -> None:
    record, path = reference
    texts = json.loads((Path(__file__).parent / "prompts.json").read_text(encoding="utf-8"))
    tokenizer = open_model(ModelConfig(model=str(path))).tokenizer()
    assert [tokenizer.encode(text) for text in texts] == record.prompts


def test_everything_at_once(reference: tuple[Any, Path], engine: Engine) -> None:
    """Mixed arrivals in chunks of 7 over cached prefixes, in so few blocks that requests are preempted.

    What CI runs; each of these alone is below, and takes as long.
    """
    record, _ = reference
    order = list(range(len(record.rows)))
    random.Random(1).shuffle(order)
    llm = engine(num_gpu_blocks_override=34, block_size=16, max_num_seqs=12, long_prefill_token_threshold=7)
    run(llm, record, order)
    assert llm.get_metrics().preemptions > 0


@pytest.mark.slow
def test_each_prompt_alone(reference: tuple[Any, Path], engine: Engine) -> None:
    record, _ = reference
    llm = engine(enable_prefix_caching=False)
    for index in range(len(record.rows)):
        run(llm, record, [index])


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_random_mixes_and_arrival_orders(reference: tuple[Any, Path], engine: Engine, seed: int) -> None:
    record, _ = reference
    order = list(range(len(record.rows))) * seed
    random.Random(seed).shuffle(order)
    run(engine(max_num_seqs=5 + seed), record, order)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunked_prompts(reference: tuple[Any, Path], engine: Engine, chunk: int) -> None:
    record, _ = reference
    llm = engine(long_prefill_token_threshold=chunk, enable_prefix_caching=False)
    run(llm, record, list(range(len(record.rows))))


@pytest.mark.slow
def test_whole_prompts(reference: tuple[Any, Path], engine: Engine) -> None:
    record, _ = reference
    llm = engine(enable_chunked_prefill=False, enable_prefix_caching=False)
    run(llm, record, list(range(len(record.rows))))


@pytest.mark.slow
def test_a_second_pass_over_cached_prefixes(reference: tuple[Any, Path], engine: Engine) -> None:
    record, _ = reference
    llm = engine()
    order = list(range(len(record.rows)))
    run(llm, record, order)
    before = llm.get_metrics().prefix_hits
    run(llm, record, order[::-1])
    assert llm.get_metrics().prefix_hits > before


@pytest.mark.slow
def test_so_few_blocks_that_requests_are_preempted(reference: tuple[Any, Path], engine: Engine) -> None:
    record, _ = reference
    llm = engine(num_gpu_blocks_override=34, block_size=16, max_num_seqs=12)
    run(llm, record, list(range(len(record.rows))))
    assert llm.get_metrics().preemptions > 0


@pytest.mark.slow
def test_asynchronous_scheduling(reference: tuple[Any, Path], engine: Engine) -> None:
    record, _ = reference
    run(engine(async_scheduling=True, max_num_seqs=4), record, list(range(len(record.rows))))


@pytest.mark.slow
def test_the_reference_providers_alone(reference: tuple[Any, Path], engine: Engine) -> None:
    record, _ = reference
    llm = engine(provider={"all": "reference"})
    assert {binding.provider for binding in llm.plan.bindings} == {"reference"}
    run(llm, record, list(range(len(record.rows)))[:4])
