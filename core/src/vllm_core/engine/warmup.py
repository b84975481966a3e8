"""Warm-up: real steps through the real program, so that a provider that fails does so before the first request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vllm_core.engine.messages import EngineRequest
from vllm_core.sampling_params import PoolingParams, SamplingParams, StructuredOutputsParams

if TYPE_CHECKING:
    import numpy.typing as npt

    from vllm_core.engine.core import EngineCore
    from vllm_core.models.spec import ModelSpec

PROMPT_TOKENS = 16
_SAMPLING = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, top_k=5, top_p=0.9, repetition_penalty=1.1, logprobs=1, min_tokens=1, logit_bias={0: 1.0}),
    SamplingParams(temperature=0.8),
)
_MASKED = SamplingParams(temperature=0.0, structured_outputs=StructuredOutputsParams(json_object=True))


class _AnyToken:
    """A grammar in which every token may follow: masks are brought and applied without one that had to be compiled."""

    ended = False

    def __init__(self, vocab_size: int) -> None:
        self._words = np.full(-(-vocab_size // 32), -1, dtype=np.int32)

    def accept(self, token: int) -> bool:
        return True

    def mask(self) -> npt.NDArray[np.int32]:
        return self._words


def warm_up(core: EngineCore, spec: ModelSpec, max_model_len: int) -> None:
    """Run a prefill, mixed steps and decodes with greedy, plain random, varied and constrained sampling; raises what a provider
    raises.

    ``core`` has a scheduler of its own, thrown away after: what it wrote to the device is overwritten on admission.
    """
    length = max(1, min(PROMPT_TOKENS, max_model_len - 4))
    for number in range(len(_SAMPLING)):
        prompt = [(number + i) % spec.vocab_size for i in range(length)]
        core.add(_request(f"warm-up-{number}", prompt, spec, number))
        core.step()
    if spec.pooling is None:
        core.scheduler.add(_generation("warm-up-masked", [0] * length, _MASKED), _AnyToken(spec.vocab_size))
    while core.has_work:
        core.step()


def _request(request_id: str, prompt: list[int], spec: ModelSpec, number: int) -> EngineRequest:
    if spec.pooling is not None:
        return EngineRequest(request_id=request_id, prompt_token_ids=prompt, arrival_time=0.0, pooling=PoolingParams())
    return _generation(request_id, prompt, _SAMPLING[number])


def _generation(request_id: str, prompt: list[int], params: SamplingParams) -> EngineRequest:
    return EngineRequest(request_id=request_id, prompt_token_ids=prompt, arrival_time=0.0, params=params, max_tokens=2)
