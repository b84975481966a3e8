"""Warm-up: real steps through the real program, so that a provider that fails does so before the first request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_core.engine.messages import EngineRequest
from vllm_core.sampling_params import PoolingParams, SamplingParams

if TYPE_CHECKING:
    from vllm_core.engine.core import EngineCore
    from vllm_core.models.spec import ModelSpec

PROMPT_TOKENS = 16
_SAMPLING = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, top_k=5, top_p=0.9, repetition_penalty=1.1, logprobs=1, min_tokens=1, logit_bias={0: 1.0}),
    SamplingParams(temperature=0.8),
)


def warm_up(core: EngineCore, spec: ModelSpec, max_model_len: int) -> None:
    """Run a prefill, mixed steps and decodes with greedy, plain random and varied sampling; raises what a provider raises.

    ``core`` has a scheduler of its own, thrown away after: what it wrote to the device is overwritten on admission.
    """
    length = max(1, min(PROMPT_TOKENS, max_model_len - 4))
    for number in range(len(_SAMPLING)):
        prompt = [(number + i) % spec.vocab_size for i in range(length)]
        core.add(_request(f"warm-up-{number}", prompt, spec, number))
        core.step()
    while core.has_work:
        core.step()


def _request(request_id: str, prompt: list[int], spec: ModelSpec, number: int) -> EngineRequest:
    if spec.pooling is not None:
        return EngineRequest(request_id=request_id, prompt_token_ids=prompt, arrival_time=0.0, pooling=PoolingParams())
    params = _SAMPLING[number]
    return EngineRequest(request_id=request_id, prompt_token_ids=prompt, arrival_time=0.0, params=params, max_tokens=2)
