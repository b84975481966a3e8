"""The engine in its own process: streams, aborts, deaths and restarts."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import zmq.asyncio

from vllm_core import AsyncLLM, PoolingParams, SamplingParams, launch
from vllm_core.api import is_available
from vllm_core.errors import (
    DeadlineError,
    EngineDeadError,
    EngineError,
    PlanError,
    RequestError,
    TokenizerError,
    UnsupportedError,
    WeightsError,
)
from vllm_core.registry.load import open_platform

pytestmark = pytest.mark.anyio

PROMPT = [(17 * i + 2) % 250 for i in range(30)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
OPTIONS = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 16, "kv_cache_memory_bytes": 1 << 23}
FAILS_WITH_A_FILE = """
import pathlib
from vllm_core.ops.{module} import {op} as reference

def {op}(*arguments):
    if pathlib.Path(r"{file}").exists():
        raise RuntimeError("worn out")
    reference(*arguments)
"""


async def until(condition):
    """Wait; the test's time limit is the limit."""
    while not condition():
        await asyncio.sleep(0.02)


def has_ended(pid):
    """Gone, or dead and not yet collected by whoever inherited it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


async def test_requests_stream_side_by_side(llama, started, last):
    async with started(llama) as llm:
        prompts = [PROMPT[: i + 3] for i in range(8)]
        outputs = await asyncio.gather(*(last(llm, p, GREEDY, f"r{i}") for i, p in enumerate(prompts)))
        assert [o.outputs[0].token_ids for o in outputs] == [llama.greedy(p, 12) for p in prompts]
        lengths = []
        async for output in llm.generate("hello", GREEDY, "text"):
            lengths.append(len(output.outputs[0].token_ids))
            text = output.outputs[0].text
        assert lengths == sorted(set(lengths)), "each output has more than the one before"
        assert lengths[-1] == 12
        assert text == llm.tokenizer.decode(llama.greedy(llm.tokenizer.encode("hello"), 12))
        assert (await llm.stats()).finished == {"length": 9}
        assert await llm.reset_prefix_cache()


async def test_closing_a_stream_frees_the_request(llama, started, last, room):
    async with started(llama, **room) as llm:
        stream = llm.generate(PROMPT, LONG, "long")
        await stream.__anext__()
        assert (await llm.stats()).running == 1
        assert not await llm.reset_prefix_cache()
        await stream.aclose()
        stats = await llm.stats()
        assert (stats.running, stats.finished) == (0, {"abort": 1})
        while (await llm.stats()).kv_usage:  # blocks stay until the step that was in flight has been read
            await asyncio.sleep(0.01)
        # A task that is cancelled while it waits closes its stream as well.
        task = asyncio.create_task(last(llm, PROMPT, LONG, "cancelled"))
        while not (await llm.stats()).running:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await llm.stats()).running == 0
        assert (await last(llm, PROMPT, GREEDY, "long")).outputs[0].token_ids == llama.greedy(PROMPT, 12)


async def test_a_stop_string_ends_the_request_in_the_engine(llama, started, last, room):
    async with started(llama, **room) as llm:
        text = (await last(llm, "hello", GREEDY, "whole")).outputs[0].text
        stop = next(c for c in text if c != "�")
        out = (await last(llm, "hello", LONG.replace(stop=stop), "stopped")).outputs[0]
        assert (out.text, out.finish_reason, out.stop_reason) == (text[: text.index(stop)], "stop", stop)
        stats = await llm.stats()
        assert (stats.running, stats.finished) == (0, {"length": 1, "abort": 1})


async def test_a_deadline_ends_a_request_and_frees_it(llama, started):
    async with started(llama) as llm:
        ends = asyncio.get_running_loop().time() + 0.5

        async def late() -> None:
            async for _ in llm.generate(PROMPT, LONG.replace(n=8), "late", deadline=ends):
                os.kill(llm._process.pid, signal.SIGSTOP)  # it runs, and cannot be done before

        with pytest.raises(DeadlineError, match="deadline"):
            await late()
        os.kill(llm._process.pid, signal.SIGCONT)
        assert (await llm.stats()).running == 0
        far = asyncio.get_running_loop().time() + 1000
        stream = llm.generate(PROMPT, GREEDY, "in time", deadline=far)
        assert [output async for output in stream][-1].outputs[0].token_ids == llama.greedy(PROMPT, 12)


async def test_wrong_requests_disturb_nothing(llama, started, last, room):
    async with started(llama, **{**room, "num_gpu_blocks_override": 520, "kv_cache_memory_bytes": None}) as llm:
        good = asyncio.create_task(last(llm, PROMPT, LONG.replace(max_tokens=2000), "good"))
        for prompt, mentions in (([1, 257], "257"), ([], "empty"), ([1] * 8192, "8192 tokens")):
            with pytest.raises(RequestError, match=mentions):
                await last(llm, prompt, GREEDY, "wrong")
        with pytest.raises(RequestError, match="runner 'generate'"):
            await llm.embed(PROMPT, PoolingParams(), "embed")
        with pytest.raises(RequestError, match="in use"):
            await last(llm, PROMPT, GREEDY, "good")
        assert (await good).outputs[0].token_ids[:226] == llama.greedy(PROMPT, 226)


async def test_a_process_that_is_killed_fails_its_requests_and_starts_again(llama, started, last, room):
    async with started(llama, **room) as llm:
        assert llm.is_alive
        pid = llm._process.pid
        tasks = [asyncio.create_task(last(llm, [i, *PROMPT], LONG, f"r{i}")) for i in range(3)]
        question = asyncio.create_task(llm.stats())
        await question
        os.kill(pid, signal.SIGKILL)
        for task in tasks:
            with pytest.raises(EngineDeadError, match="exit status -9"):
                await task
        assert not llm.is_alive
        with pytest.raises(EngineDeadError):
            await llm.stats()
        with pytest.raises(EngineDeadError):
            await last(llm, PROMPT, GREEDY, "meanwhile")
        await until(lambda: llm.is_alive)
        assert llm._process.pid != pid
        assert (await last(llm, PROMPT, GREEDY, "r0")).outputs[0].token_ids == llama.greedy(PROMPT, 12)
        assert (await llm.stats()).running == 0, "the old requests are not in the new engine"


async def test_messages_that_cannot_be_read_end_the_engine(llama, started, last, room):
    """Rather than leave its requests waiting for ever."""
    async with started(llama, **room) as llm:
        task = asyncio.create_task(last(llm, PROMPT, LONG, "r"))
        while not (await llm.stats()).running:
            await asyncio.sleep(0.01)
        with zmq.asyncio.Context() as context, context.socket(zmq.PUSH) as socket:
            socket.connect(f"ipc://{llm._folder}/out")
            await socket.send_multipart((b"updates", b"no such form"))
            with pytest.raises(EngineError, match=r"DecodeError|ValidationError"):
                await task
        assert not llm.is_alive
        with pytest.raises(EngineError):
            await last(llm, PROMPT, GREEDY, "late")


async def test_an_engine_that_dies_again_and_again_is_given_up(llama, monkeypatch, started, last):
    monkeypatch.setattr("vllm_core.async_llm.MAX_RESTARTS", 0)
    async with started(llama) as llm:
        os.kill(llm._process.pid, signal.SIGKILL)
        await until(lambda: llm.error is not None)
        assert not llm.is_alive
        with pytest.raises(EngineDeadError):
            await last(llm, PROMPT, GREEDY, "r")


async def test_a_provider_that_fails_while_serving_is_denied_after_a_restart(llama, site, tmp_path, started, last):
    file = tmp_path / "armed"
    site.kernels("worn", {"sample": "sample"}, FAILS_WITH_A_FILE.format(module="sampling", op="sample", file=file))
    async with started(llama) as llm:
        assert llm._blueprint.plan.binding("sample", "tail").provider == "worn"
        assert (await last(llm, PROMPT, GREEDY, "before")).outputs[0].token_ids == llama.greedy(PROMPT, 12)
        file.touch()
        process = llm._process
        with pytest.raises(EngineDeadError, match="sample at tail, provider worn") as caught:
            await last(llm, PROMPT, GREEDY, "unlucky")
        assert "worn out" in caught.value.found
        assert process.returncode == 1, "it ended by itself, and was not aborted"
        await until(lambda: llm.is_alive)
        assert (await last(llm, PROMPT, GREEDY, "after")).outputs[0].token_ids == llama.greedy(PROMPT, 12)
        (demotion,) = llm._blueprint.plan.demotions
        assert (demotion.op, demotion.role, demotion.provider) == ("sample", "tail", "worn")
        assert "worn out" in demotion.cause
        assert "demoted   1, last sample: worn" in llm.plan_text


async def test_warm_up_demotes_in_the_engine_process_and_the_owner_knows(llama, site, tmp_path, started):
    file = tmp_path / "armed"
    file.touch()
    site.kernels("worn", {"sample": "sample"}, FAILS_WITH_A_FILE.format(module="sampling", op="sample", file=file))
    async with started(llama) as llm:
        assert [d.provider for d in llm._blueprint.plan.demotions] == ["worn"]


@pytest.mark.parametrize("wrong", ["weights", "tokenizer", "provider"])
async def test_errors_of_the_start_reach_the_owner_whole(llama, tmp_path, wrong, site):
    """Whichever process found them."""
    folder, options = tmp_path / "model", {}
    shutil.copytree(llama.path, folder)
    if wrong == "weights":
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:5000])
        expected, mentions = WeightsError, "model.safetensors"
    elif wrong == "tokenizer":
        (folder / "tokenizer.json").write_text("{")
        expected, mentions = TokenizerError, "tokenizer.json"
    else:
        armed = tmp_path / "armed"
        armed.touch()
        site.kernels("worn", {"sample": "sample"}, FAILS_WITH_A_FILE.format(module="sampling", op="sample", file=armed))
        options, expected, mentions = {"provider": {"sample": "worn"}}, PlanError, "worn out"
    llm = AsyncLLM(model=str(folder), **OPTIONS, **options)
    with pytest.raises(expected, match=mentions) as caught:
        await llm.start()
    assert all((caught.value.what, caught.value.on, caught.value.found, caught.value.expected, caught.value.fix))
    assert not llm.is_alive
    if llm._process is not None:
        await llm._process.wait()


async def test_shutdown_fails_what_runs_and_leaves_no_process(llama, last, room):
    llm = AsyncLLM(model=str(llama.path), **{**OPTIONS, **room})
    await llm.start()
    folder, process = llm._folder, llm._process
    task = asyncio.create_task(last(llm, PROMPT, LONG, "r"))
    while not (await llm.stats()).running:
        await asyncio.sleep(0.01)
    llm.shutdown()
    with pytest.raises(EngineDeadError, match="has been stopped"):
        await task
    await process.wait()
    assert has_ended(process.pid)
    assert not Path(folder).exists()
    assert not llm.is_alive
    with pytest.raises(EngineDeadError):
        await last(llm, PROMPT, GREEDY, "late")


OWNER = """
import asyncio, os, sys
from vllm_core import AsyncLLM

async def main():
    llm = AsyncLLM(model=sys.argv[1], max_model_len=64, kv_cache_memory_bytes=1 << 20)
    await llm.start()
    print(llm._process.pid, llm._folder, flush=True)
    if sys.argv[2] == "dies":
        os.kill(os.getpid(), 9)
    llm.shutdown()

asyncio.run(main())
"""


@pytest.mark.parametrize("how", ["dies", "ends"])
async def test_the_process_goes_with_its_owner(llama, how):
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-W", "error", "-c", OWNER, str(llama.path), how],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == (-9 if how == "dies" else 0), done.stderr
    assert "Traceback" not in done.stderr
    assert "ResourceWarning" not in done.stderr
    pid, folder = done.stdout.split()
    await until(lambda: has_ended(int(pid)) and not Path(folder).exists())


async def test_embeddings_come_from_the_process_too(llama, started, last):
    from vllm_core import LLM

    async with started(llama, runner="pooling") as llm:
        found = await asyncio.gather(*(llm.embed(PROMPT[: i + 1], PoolingParams(), f"e{i}") for i in range(4)))
        with pytest.raises(RequestError, match="runner 'generate'"):
            await last(llm, PROMPT, GREEDY, "r")
    with LLM(str(llama.path), **OPTIONS, runner="pooling") as offline:
        expected = offline.embed([PROMPT[: i + 1] for i in range(4)], use_tqdm=False)
        same, other = offline.score(PROMPT[:3], [PROMPT[:3], PROMPT[3:9]], use_tqdm=False)
        with pytest.raises(RequestError, match="data_1"):
            offline.score([PROMPT[:3], PROMPT[3:9]], [PROMPT[:3]] * 3, use_tqdm=False)
    assert same.outputs.score == pytest.approx(1.0, abs=1e-5)
    assert other.outputs.score < same.outputs.score
    assert other.prompt_token_ids == PROMPT[:9]
    assert [f.outputs.embedding for f in found] == [e.outputs.embedding for e in expected]


async def test_a_platform_without_sleep_says_so_and_goes_on(llama, platform, started, last):
    plan = launch.blueprint({"model": str(llama.path), "platform": platform}).plan
    if is_available(open_platform(plan).manifest.claims["sleep"]):
        pytest.skip(f"{platform} sleeps")
    async with started(llama) as llm:
        with pytest.raises(UnsupportedError, match="sleep"):
            await llm.sleep()
        with pytest.raises(UnsupportedError, match="Level of sleep"):
            await llm.sleep(2)
        with pytest.raises(UnsupportedError, match="as a whole"):
            await llm.wake_up(["weights"])
        assert not await llm.is_sleeping()
        output = await last(llm, PROMPT[:5], GREEDY, "after")
        assert output.outputs[0].token_ids == llama.greedy(PROMPT[:5], 12)
