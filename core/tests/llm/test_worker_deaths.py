"""Workers of an engine that serves, killed: its requests fail with the cause, it starts again, nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from vllm_core import LLM, AsyncLLM, SamplingParams
from vllm_core.errors import EngineDeadError

PROMPT = [(17 * i + 2) % 250 for i in range(30)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
OPTIONS = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 1 << 22,
    "tensor_parallel_size": 2,
}


@pytest.fixture(scope="module", autouse=True)
def one_platform(platform):
    """Others that are installed may be refused for reasons of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_PLATFORM", platform)
        yield


def children(pid):
    """Process ids of the workers that ``pid`` has started; threads and processes may end while we look."""
    found = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += [int(child) for child in (task / "children").read_text().split()]
    return [child for child in found if not has_ended(child) and "worker_main" in Path(f"/proc/{child}/cmdline").read_text()]


def has_ended(pid):
    """Gone, or dead and not yet collected by whoever inherited it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


async def until(condition):
    """Wait; the test's time limit is the limit."""
    while not condition():
        await asyncio.sleep(0.02)


@asynccontextmanager
async def started(model, **options):
    """An engine that is shut down, and whose processes have ended, when the test has."""
    llm = AsyncLLM(model=str(model.path), **{**OPTIONS, **options})
    await llm.start()
    try:
        yield llm
    finally:
        process = llm._process
        left = children(process.pid)
        llm.shutdown()
        await process.wait()
        await until(lambda: all(map(has_ended, left)))


async def last(llm, name, params=GREEDY):
    """The token ids of a request."""
    return [output async for output in llm.generate(PROMPT, params, name)][-1].outputs[0].token_ids


@pytest.mark.anyio
async def test_a_killed_worker_fails_the_requests_with_its_rank_and_the_engine_starts_again(llama):
    expected = llama.greedy(PROMPT, 12)
    async with started(llama) as llm:
        assert await last(llm, "first") == expected
        assert [one.name for one in Path(llm._folder).glob("*/meet")] == ["meet"], "removed with the owner's, also after a kill"
        engine, (worker,) = llm._process.pid, children(llm._process.pid)
        tasks = [asyncio.create_task(last(llm, f"r{i}", LONG)) for i in range(3)]
        while not (await llm.stats()).running:
            await asyncio.sleep(0.01)
        os.kill(worker, 9)
        for task in tasks:
            with pytest.raises(EngineDeadError, match=r"rank 1 of 2, device \w+:") as caught:
                await task
            assert "killed by signal 9" in caught.value.found
        await until(lambda: llm.is_alive)
        assert llm._process.pid != engine
        assert await last(llm, "again") == expected
        # And between steps, when there is nothing to do.
        (worker,) = children(llm._process.pid)
        os.kill(worker, 9)
        await until(lambda: not llm.is_alive)
        with pytest.raises(EngineDeadError):
            await last(llm, "meanwhile")


@pytest.mark.slow
@pytest.mark.anyio
async def test_a_worker_that_hangs_while_it_serves_is_named_and_the_engine_starts_again(llama):
    """Half a minute without a sign of life: less than a step may take, so that the worker is named and not the engine."""
    async with started(llama) as llm:
        (worker,) = children(llm._process.pid)
        task = asyncio.create_task(last(llm, "first", LONG))
        while not (await llm.stats()).running:
            await asyncio.sleep(0.01)
        os.kill(worker, signal.SIGSTOP)
        with pytest.raises(EngineDeadError, match=r"rank 1 of 2, device \w+:") as caught:
            await task
        assert "stopped by a signal" in caught.value.found
        assert has_ended(worker)
        await until(lambda: llm.is_alive)
        assert await last(llm, "again") == llama.greedy(PROMPT, 12)


class Killer(threading.Thread):
    """Kills the first worker that this process starts, after a delay."""

    def __init__(self, delay_s):
        super().__init__(daemon=True)
        self.delay_s, self.victim, self.stop = delay_s, None, threading.Event()

    def run(self):
        while not self.stop.wait(0.01):
            if found := children(os.getpid()):
                self.stop.wait(self.delay_s)
                self.victim = found[0]
                os.kill(self.victim, 9)
                return


def serve_for_ever(model):
    """Ends when the engine does: on a fast machine it may be ready before its worker is killed."""
    with LLM(str(model.path), **OPTIONS) as llm:
        while True:
            llm.generate([PROMPT], GREEDY, use_tqdm=False)


@pytest.mark.parametrize("seed", range(3))
def test_a_worker_killed_while_the_engine_starts_is_why_it_does_not(llama, seed):
    killer = Killer(random.Random(seed).random() * 2.0)
    killer.start()
    with pytest.raises(EngineDeadError, match="rank 1 of 2") as caught:
        serve_for_ever(llama)
    killer.join()
    assert caught.value.found == "killed by signal 9 (Killed)"
    assert has_ended(killer.victim)
    assert children(os.getpid()) == []


OWNER = """
import os, sys
from vllm_core import LLM

llm = LLM(sys.argv[1], max_model_len=64, kv_cache_memory_bytes=1 << 20, tensor_parallel_size=2, load_format="dummy")
print(*llm._engine.workers.pids, flush=True)
if sys.argv[2] == "is killed":
    os.kill(os.getpid(), 9)
"""


@pytest.mark.anyio
@pytest.mark.parametrize("how", ["is killed", "just ends"])
async def test_workers_go_with_the_program_that_made_the_engine(llama, how):
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-W", "error", "-c", OWNER, str(llama.path), how],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == (-9 if how == "is killed" else 0), done.stderr
    assert "Traceback" not in done.stderr
    await until(lambda: has_ended(int(done.stdout)))
