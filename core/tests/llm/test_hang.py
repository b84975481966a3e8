"""An engine process that stands still is ended and started again; its requests fail meanwhile, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from vllm_core import AsyncLLM, SamplingParams
from vllm_core.errors import EngineDeadError

pytestmark = pytest.mark.anyio

PROMPT = [(17 * i + 2) % 250 for i in range(30)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 16, "kv_cache_memory_bytes": 1 << 23}
WAITS_FOR_A_FILE = """
import pathlib, time
from vllm_core.ops.sampling import sample as reference

def sample(*arguments):
    while pathlib.Path(r"{file}").exists():
        time.sleep(0.02)
    reference(*arguments)
"""


@asynccontextmanager
async def started(path: Path, **options: Any) -> AsyncIterator[Any]:
    llm: Any = AsyncLLM(model=str(path), **OPTIONS, **options)
    await llm.start()
    try:
        yield llm
    finally:
        process = llm._process
        llm.shutdown()
        await process.wait()


async def last(llm: Any, params: SamplingParams, name: str) -> list[int]:
    found = [output async for output in llm.generate(PROMPT, params, name)][-1]
    return list(found.outputs[0].token_ids)


async def serves_again(llm: Any, llama: Any) -> None:
    while not llm.is_alive:
        await asyncio.sleep(0.05)
    assert await last(llm, GREEDY, "after") == llama.greedy(PROMPT, 8)
    assert llm.num_restarts == 1


async def test_a_process_that_a_signal_stopped_is_replaced(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_core.pulse.SILENT_S", 3.0)
    async with started(llama.path) as llm:
        running = asyncio.create_task(last(llm, LONG, "running"))
        while not (await llm.stats()).running:
            await asyncio.sleep(0.01)
        process = llm._process
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(EngineDeadError, match="Engine process hangs: no sign of life"):
            await running
        assert process.returncode == -signal.SIGKILL
        await serves_again(llm, llama)


async def test_a_step_that_does_not_end_is_ended(llama: Any, site: Any, tmp_path: Path) -> None:
    """As one on a device that answers no more: the process runs, and its main thread waits."""
    file = tmp_path / "armed"
    site.kernels("stuck", {"sample": "sample"}, WAITS_FOR_A_FILE.format(file=file))
    async with started(llama.path, step_timeout_s=2.0) as llm:
        assert await last(llm, GREEDY, "before") == llama.greedy(PROMPT, 8)
        file.touch()
        with pytest.raises(EngineDeadError, match="Engine process hangs: one step that has taken"):
            await last(llm, GREEDY, "stuck")
        file.unlink()
        await serves_again(llm, llama)


async def test_an_engine_with_nothing_to_do_is_not_taken_to_hang(llama: Any) -> None:
    async with started(llama.path, step_timeout_s=1.5) as llm:
        await asyncio.sleep(4.0)
        assert await last(llm, GREEDY, "late") == llama.greedy(PROMPT, 8)
        assert llm.num_restarts == 0
