"""Several engines behind one: where requests go, and that they answer as one engine does."""

from __future__ import annotations

import asyncio

import pytest

from vllm_core.engine.messages import EngineStats
from vllm_core.errors import ConfigError, PlanError
from vllm_core.replica_devices import replica_options
from vllm_core.replicas import PIECE, SLACK, Replicas, Routes, add_stats
from vllm_core.sampling_params import SamplingParams

PROMPT = list(range(4 * PIECE))


def test_prompts_with_a_common_prefix_go_to_one_engine():
    routes = Routes(3)
    first = routes.choose(PROMPT, "", [0, 1, 2])
    with routes.counted(first):
        assert routes.choose([*PROMPT[: 2 * PIECE], *[9] * PIECE], "", [0, 1, 2]) == first


def test_text_prompts_are_compared_by_characters():
    routes = Routes(2)
    first = routes.choose("a" * 5000, "", [0, 1])
    with routes.counted(first):
        assert routes.choose("a" * 4800 + "b" * 400, "", [0, 1]) == first


def test_another_salt_is_another_prefix():
    routes = Routes(2)
    first = routes.choose(PROMPT, "one", [0, 1])
    with routes.counted(first):
        assert routes.choose(PROMPT, "two", [0, 1]) != first


def test_a_prompt_without_a_known_prefix_goes_to_the_least_busy_engine():
    routes = Routes(2)
    with routes.counted(0):
        assert routes.choose([1, 2, 3], "", [0, 1]) == 1


def test_a_busy_engine_loses_its_prefixes():
    routes = Routes(2)
    first = routes.choose(PROMPT, "", [0, 1])
    routes.running[first] = SLACK + 1
    assert routes.choose(PROMPT, "", [0, 1]) != first


def test_an_engine_that_is_down_gets_nothing():
    routes = Routes(2)
    first = routes.choose(PROMPT, "", [0, 1])
    assert routes.choose(PROMPT, "", [1 - first]) == 1 - first


def test_a_request_counts_until_it_ends_however_it_ends():
    routes, seen = Routes(1), []

    def work() -> None:
        with routes.counted(0):
            seen.extend(routes.running)
            raise ValueError("gone")

    with pytest.raises(ValueError, match="gone"):
        work()
    assert seen == [1]
    assert routes.running == [0]


def test_statistics_add_up():
    total = add_stats(
        [
            EngineStats(running=1, kv_usage=0.5, finished={"stop": 2}),
            EngineStats(running=2, kv_usage=0.1, finished={"stop": 1, "length": 1}),
        ]
    )
    assert (total.running, total.kv_usage, total.finished) == (3, pytest.approx(0.3), {"length": 1, "stop": 3})


def test_one_engine_has_no_replicas(llama):
    from vllm_core import LLM

    with pytest.raises(ConfigError, match="One engine has no replicas"):
        LLM(str(llama.path), data_parallel_size=2, platform="cpu")


def test_engines_without_devices_are_refused(llama):
    options = {"model": str(llama.path), "platform": "cpu", "data_parallel_size": 2, "device_ids": ["elsewhere"]}
    with pytest.raises(PlanError, match="Too few devices"):
        replica_options(options)


def test_engines_that_share_a_device_share_its_memory(llama):
    parts = replica_options({"model": str(llama.path), "platform": "cpu", "data_parallel_size": 2})
    assert [part["device_memory_utilization"] for part in parts] == [0.45, 0.45]
    assert len({tuple(part["device_ids"]) for part in parts}) == 1


def test_two_engines_answer_as_one(llama, platform):
    prompts = [[3, 4, 5], [6, 7], [8, 9, 10, 11]]
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)

    async def answers(count: int) -> tuple[list[list[int]], list[int]]:
        engine = Replicas(
            model=str(llama.path), platform=platform, max_model_len=64, kv_cache_memory_bytes=1 << 20, data_parallel_size=count
        )
        await engine.start()
        try:
            tokens, busiest = [], []

            async def one(index: int) -> list[int]:
                last: list[int] = []
                async for output in engine.generate(prompts[index], params, f"r{index}"):
                    last = list(output.outputs[0].token_ids)
                return last

            tokens = await asyncio.gather(*(one(index) for index in range(3)))
            busiest = [(await each.stats()).finished.get("length", 0) for each in engine.engines]
            assert (await engine.stats()).finished == {"length": 3}
            assert await engine.reset_prefix_cache()
            return tokens, busiest
        finally:
            processes = [each._process for each in engine.engines]
            engine.shutdown()
            await asyncio.gather(*(process.wait() for process in processes))

    alone, _ = asyncio.run(answers(1))
    both, busiest = asyncio.run(answers(2))
    assert both == alone
    assert sorted(busiest) == [1, 2]
