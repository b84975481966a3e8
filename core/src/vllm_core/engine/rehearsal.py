"""Rehearsal: the steps that an engine will run, run once where the device runs nothing but gets ready what they launch.

A device that compiles kernels when they are first launched takes them all at once so, instead of one after the other while
a request waits: those of warm-up, of prompts of all lengths, and of every step that will be captured.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from vllm_core.engine.messages import EngineRequest
from vllm_core.engine.program import ComposedProgram
from vllm_core.engine.warmup import warm_up
from vllm_core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from vllm_core.api import Device
    from vllm_core.engine.core import EngineCore
    from vllm_core.models.spec import ModelSpec

log = logging.getLogger(__name__)

LONGEST_PROMPT = 1024
"""Kernels for longer prompts are the same; of this length also a large model's products take but a moment."""


def rehearse(
    core: EngineCore, program: ComposedProgram, device: Device, providers: Iterable[str], spec: ModelSpec, max_model_len: int
) -> bool:
    """Rehearse if the device can with these providers; whether it did.

    ``core`` is thrown away after, as for warm-up. Nothing is lost where a rehearsal fails: its reason is logged, and the real
    steps launch, and fail, as they would have.
    """
    context = device.rehearsal(frozenset(providers))
    if context is None:
        return False
    started = time.perf_counter()
    try:
        with context:
            warm_up(core, spec, max_model_len)
            program.rehearse()
            if spec.pooling is None:
                _prompts(core, spec, max_model_len)
    except Exception as error:  # noqa: BLE001 - what is wrong shows, with its cause, in the steps that follow
        log.info("rehearsal ended after %.1f s: %s: %s", time.perf_counter() - started, type(error).__name__, error)
    finally:
        if program.captured is not None:
            program.captured.reset()
    return True


def _prompts(core: EngineCore, spec: ModelSpec, max_model_len: int) -> None:
    """Prompts of each power of two, each beside the tokens of those before it."""
    length = 1
    while length <= min(LONGEST_PROMPT, max_model_len - 4):
        prompt = [(length + i) % spec.vocab_size for i in range(length)]
        params = SamplingParams(temperature=0.0)
        name = f"rehearsal-{length}"
        request = EngineRequest(request_id=name, prompt_token_ids=prompt, arrival_time=0.0, params=params, max_tokens=3)
        core.add(request)
        core.step()
        length *= 2
    while core.has_work:
        core.step()
