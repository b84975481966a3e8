"""What crosses the border of the engine core: requests in, updates and statistics out.

msgspec structs, so that the same values travel in-process and over ZeroMQ. Imports no torch.
"""

from __future__ import annotations

import msgspec

from vllm_core.sampling_params import PoolingParams, SamplingParams


class EngineRequest(msgspec.Struct, kw_only=True, frozen=True):
    """One sequence to generate, or one prompt to pool; validated and complete.

    `params.n` is 1 here: a request with more is split before. `seed` is always set. `max_tokens` is resolved against
    the context. `stop_token_ids` end the sequence (those of the model unless `ignore_eos`, and the user's);
    `bad_words` are token sequences. `salt` separates prefix caches (tenant, adapter).
    """

    request_id: str
    prompt_token_ids: list[int]
    arrival_time: float
    params: SamplingParams | None = None
    pooling: PoolingParams | None = None
    priority: int = 0
    salt: str = ""
    seed: int = 0
    max_tokens: int = 1
    stop_token_ids: list[int] = []
    bad_words: list[list[int]] = []


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Of one position: the chosen token's log-probability and rank, and the most likely tokens with theirs."""

    token: int
    logprob: float
    rank: int
    top_ids: list[int]
    top: list[float]


class RequestUpdate(msgspec.Struct, kw_only=True, gc=False, omit_defaults=True):
    """What one step brought one request. `finish_reason` is stop, length, abort or error; None while running.

    `stop_reason` is the stop token, where one ended it. `prompt_logprobs` comes once, with the first token; its first
    entry is None. `queue_s`, `prefill_s` and `decode_s` come with the finish.
    """

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    pooled: list[float] | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0


class EngineStats(msgspec.Struct, kw_only=True):
    """Counters since start and gauges now."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    steps: int = 0
    finished: dict[str, int] = {}
    calls_by_kind: dict[str, int] = {}
