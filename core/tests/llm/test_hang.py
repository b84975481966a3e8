"""An engine process that stands still is ended and started again; its requests fail meanwhile, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from vllm_core import SamplingParams
from vllm_core.errors import EngineDeadError

pytestmark = pytest.mark.anyio

PROMPT = [(17 * i + 2) % 250 for i in range(30)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
WAITS_FOR_A_FILE = """
import pathlib, time
from vllm_core.ops.sampling import sample as reference

def sample(*arguments):
    while pathlib.Path(r"{file}").exists():
        time.sleep(0.02)
    reference(*arguments)
"""


async def serves_again(llm: Any, llama: Any, last: Any) -> None:
    while not llm.is_alive:
        await asyncio.sleep(0.05)
    assert (await last(llm, PROMPT, GREEDY, "after")).outputs[0].token_ids == llama.greedy(PROMPT, 8)
    assert llm.num_restarts == 1


async def test_a_process_that_a_signal_stopped_is_replaced(
    llama: Any, monkeypatch: pytest.MonkeyPatch, started: Any, last: Any, room: dict[str, Any]
) -> None:
    monkeypatch.setattr("vllm_core.pulse.SILENT_S", 3.0)
    async with started(llama, **room) as llm:
        running = asyncio.create_task(last(llm, PROMPT, LONG, "running"))
        while not (await llm.stats()).running:
            await asyncio.sleep(0.01)
        process = llm._process
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(EngineDeadError, match="Engine process hangs: no sign of life"):
            await running
        assert process.returncode == -signal.SIGKILL
        await serves_again(llm, llama, last)


async def test_a_process_that_no_kill_ends_keeps_nobody_waiting(
    llama: Any, monkeypatch: pytest.MonkeyPatch, started: Any, last: Any
) -> None:
    """As one whose driver does not answer: its requests fail, and no second engine starts on a device that it still has."""
    monkeypatch.setattr("vllm_core.pulse.SILENT_S", 3.0)
    monkeypatch.setattr("vllm_core.async_llm.KILLED_S", 0.2)
    async with started(llama) as llm:
        process = llm._process
        with monkeypatch.context() as held:
            held.setattr(process, "kill", lambda: None)
            os.kill(process.pid, signal.SIGSTOP)
            with pytest.raises(EngineDeadError, match="Engine process hangs: no sign of life"):
                await last(llm, PROMPT, LONG, "running")
            while llm.error is None:
                await asyncio.sleep(0.01)
        assert not llm.is_alive
        assert llm.num_restarts == 0
        with pytest.raises(EngineDeadError, match="no sign of life"):
            await last(llm, PROMPT, GREEDY, "late")


async def test_a_step_that_does_not_end_is_ended(llama: Any, site: Any, tmp_path: Path, started: Any, last: Any) -> None:
    """As one on a device that answers no more: the process runs, and its main thread waits."""
    file = tmp_path / "armed"
    site.kernels("stuck", {"sample": "sample"}, WAITS_FOR_A_FILE.format(file=file))
    async with started(llama, step_timeout_s=2.0) as llm:
        assert (await last(llm, PROMPT, GREEDY, "before")).outputs[0].token_ids == llama.greedy(PROMPT, 8)
        file.touch()
        with pytest.raises(EngineDeadError, match="Engine process hangs: one step that has taken"):
            await last(llm, PROMPT, GREEDY, "stuck")
        file.unlink()
        await serves_again(llm, llama, last)


async def test_an_engine_with_nothing_to_do_is_not_taken_to_hang(llama: Any, started: Any, last: Any) -> None:
    async with started(llama, step_timeout_s=1.5) as llm:
        await asyncio.sleep(4.0)
        assert (await last(llm, PROMPT, GREEDY, "late")).outputs[0].token_ids == llama.greedy(PROMPT, 8)
        assert llm.num_restarts == 0


async def test_a_start_that_does_not_end_is_given_up(
    llama: Any, monkeypatch: pytest.MonkeyPatch, started: Any, last: Any
) -> None:
    """As one on a device that a crash has left in disorder: probes would see an engine that starts again for ever."""
    monkeypatch.setattr("vllm_core.async_llm.START_TIMES", 0)
    async with started(llama, step_timeout_s=2.0) as llm:
        first = llm._process
        first.kill()
        while llm._process is first:
            await asyncio.sleep(0.01)
        os.kill(llm._process.pid, signal.SIGSTOP)
        while llm.error is None:
            await asyncio.sleep(0.01)
        assert llm._process.returncode == -signal.SIGKILL
        with pytest.raises(EngineDeadError, match=r"Engine process hangs: .*\n.*a start that has taken 2 s"):
            await last(llm, PROMPT, GREEDY, "late")
