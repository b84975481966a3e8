"""One model on several workers: the same tokens as on one, whatever the requests ask for."""

from __future__ import annotations

import os
import random
import re
import signal
from pathlib import Path

import pytest

from vllm_core import LLM, SamplingParams
from vllm_core.engine.binding import ProviderFailedError
from vllm_core.errors import ConfigError, EngineDeadError

PROMPTS = [[(17 * i + 5 * n) % 250 for i in range(20 + 3 * n)] for n in range(6)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
FAILS_ELSEWHERE = """
import pathlib, sys
from vllm_core.ops.sampling import sample as reference

def sample(*arguments):
    if "worker_main" in sys.argv[0] and pathlib.Path(r"{file}").exists():
        raise RuntimeError("worn out")
    reference(*arguments)
"""


@pytest.fixture(scope="module", autouse=True)
def one_platform(platform):
    """Others that are installed may be refused for reasons of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_PLATFORM", platform)
        yield


@pytest.fixture(scope="module")
def two(llama, one_platform):
    """Two workers with so few blocks that requests are preempted, and a prefix cache."""
    options = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 8, "block_size": 8, "num_gpu_blocks_override": 24}
    with LLM(str(llama.path), tensor_parallel_size=2, **options) as llm:
        yield llm


def test_tokens_are_those_of_one_worker_with_preemption_and_a_prefix_cache(llama, two, run):
    expected = [llama.greedy(prompt, 24) for prompt in PROMPTS]
    assert run(two, PROMPTS, GREEDY) == expected
    stats = two.get_metrics()
    assert stats.preemptions > 0
    for _ in range(2):
        assert run(two, PROMPTS[:1], GREEDY) == expected[:1]
    assert two.get_metrics().prefix_hits > stats.prefix_hits


def test_what_requests_may_ask_for_gives_what_one_worker_gives(two, shared):
    """Drawn tokens, penalties, bans and log-probabilities of prompts: each worker samples for itself."""
    chance = random.Random(1)
    params = [
        SamplingParams(
            temperature=chance.choice([0.0, 0.7, 1.3]),
            top_p=chance.choice([1.0, 0.8]),
            top_k=chance.choice([0, 5]),
            seed=n,
            repetition_penalty=chance.choice([1.0, 1.2]),
            logit_bias={3: 2.0},
            logprobs=2,
            prompt_logprobs=1 if n % 2 else None,
            max_tokens=12,
            ignore_eos=True,
        )
        for n in range(len(PROMPTS))
    ]
    found, expected = (llm.generate(PROMPTS, params, use_tqdm=False) for llm in (two, shared))
    for one, other in zip(found, expected, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].cumulative_logprob == pytest.approx(other.outputs[0].cumulative_logprob, abs=1e-3)
        assert (one.prompt_logprobs is None) == (other.prompt_logprobs is None)


def test_the_plan_says_who_shares_and_each_keeps_its_part(two, shared):
    plan = two.plan
    assert (plan.tensor_parallel, len(plan.devices)) == (2, 2)
    assert plan.binding("all_gather", "comm") is not None
    assert shared.plan.binding("all_gather", "comm") is None
    (group,), (whole,) = plan.kv_groups, shared.plan.kv_groups
    assert (group.spec.num_kv_heads, whole.spec.num_kv_heads) == (1, 2)


def test_windows_and_the_generic_path(gemma, engines, run):
    """Only the collectives stay the platform's: their handles come from its communicator."""
    llm = engines(gemma, tensor_parallel_size=2, provider={"all": "reference"})
    assert {one.provider for one in llm.plan.bindings if one.role != "comm"} == {"reference"}
    assert "reference" not in {one.provider for one in llm.plan.bindings if one.op == "all_gather"}
    assert run(llm, PROMPTS[:3], GREEDY) == [gemma.greedy(prompt, 24) for prompt in PROMPTS[:3]]


def test_a_provider_that_fails_on_another_worker_in_warm_up_is_replaced_on_all(llama, engines, run, site, tmp_path):
    file = tmp_path / "armed"
    file.touch()
    site.kernels("worn", {"sample": "sample"}, FAILS_ELSEWHERE.format(file=file))
    llm = engines(llama, tensor_parallel_size=2)
    (demotion,) = llm.plan.demotions
    assert (demotion.op, demotion.provider) == ("sample", "worn")
    assert "worn out" in demotion.cause
    assert run(llm, PROMPTS[:1], GREEDY) == [llama.greedy(PROMPTS[0], 24)]


def test_a_provider_that_fails_on_another_worker_while_serving_is_named_with_its_rank(llama, engines, run, site, tmp_path):
    file = tmp_path / "armed"
    site.kernels("worn", {"sample": "sample"}, FAILS_ELSEWHERE.format(file=file))
    llm = engines(llama, tensor_parallel_size=2)
    assert llm.plan.demotions == ()
    file.touch()
    for _ in range(2):
        with pytest.raises(ProviderFailedError, match="provider worn, rank 1 of 2") as caught:
            run(llm, PROMPTS[:1], GREEDY)
        assert "worn out" in caught.value.found


@pytest.mark.parametrize(
    ("number", "found"), [(signal.SIGKILL, r"killed by signal 9 \(Killed\)"), (signal.SIGSTOP, "stopped by a signal")]
)
def test_a_worker_lost_between_two_calls_ends_the_engine_but_not_the_next_one(llama, engines, run, monkeypatch, number, found):
    """One that only hangs is as lost as a dead one: its silence tells."""
    monkeypatch.setattr("vllm_core.engine.parallel.worker.SILENT_S", 4.0)
    llm = engines(llama, tensor_parallel_size=2)
    pids = llm._engine.workers.pids
    os.kill(pids[0], number)
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="rank 1 of 2") as caught:
            run(llm, PROMPTS[:1], GREEDY)
        assert re.search(found, caught.value.found)
    assert not Path(f"/proc/{pids[0]}").exists(), "a worker that hangs is ended"
    llm.shutdown()


def test_the_track_of_transformers_is_shared_too(llama, engines, run):
    llm = engines(llama, tensor_parallel_size=2, model_impl="transformers")
    assert (llm.plan.track, llm.plan.tensor_parallel) == ("transformers", 2)
    assert run(llm, PROMPTS[:3], GREEDY) == [llama.greedy(prompt, 24) for prompt in PROMPTS[:3]]


@pytest.mark.parametrize(
    ("changes", "options", "mentions"),
    [
        ({"intermediate_size": 47}, {}, "47 inner features"),
        ({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}, {}, "transformers has no plan"),
    ],
)
def test_what_cannot_be_shared_is_refused_before_anything_starts(llama, changes, options, mentions):
    with pytest.raises(ConfigError) as caught:
        LLM(str(llama.path), tensor_parallel_size=2, hf_overrides=changes, **options)
    assert mentions in caught.value.found
    assert all((caught.value.what, caught.value.on, caught.value.expected, caught.value.fix))


@pytest.mark.slow
@pytest.mark.model
def test_a_real_model_says_the_same_on_two_and_three_workers(model_file, run, engines):
    """Its three KV heads are shared equally by three workers; two get one of zeros."""
    path = model_file("SmolLM2-135M-Instruct.Q4_1.gguf")
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    prompt = "The three laws of thermodynamics are"
    outcomes = [run(engines(path, tensor_parallel_size=n, kv_cache_memory_bytes=1 << 24), [prompt], params) for n in (1, 2, 3)]
    assert outcomes[1:] == outcomes[:1] * 2
    assert len(outcomes[0][0]) == 64
