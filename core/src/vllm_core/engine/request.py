"""The scheduler's own record of a sequence."""

from __future__ import annotations

from vllm_core.api import batch
from vllm_core.engine.messages import EngineRequest, TokenLogprobs


class Request:
    """One sequence between `add` and its last update.

    tokens     known tokens: prompt, then output that has been read
    unread     sampled in steps that are in flight, so tokens are `len(tokens) + unread` at most
    scheduled  tokens whose KV is written, or will be by steps in flight
    done       tokens whose KV is written by steps that have been read
    limit      tokens that the blocks hold
    leaving    no longer running, but steps in flight may still touch its blocks
    """

    __slots__ = (
        "admitted_at",
        "blocks",
        "cached",
        "done",
        "features",
        "finished",
        "first_token_at",
        "freed",
        "hashes",
        "in_flight",
        "known_prompt_logprobs",
        "leaving",
        "limit",
        "max_length",
        "min_length",
        "num_cached_tokens",
        "order",
        "prompt_len",
        "prompt_logprobs",
        "queued_at",
        "request",
        "scheduled",
        "slot",
        "stops",
        "tokens",
        "unread",
    )

    def __init__(
        self, request: EngineRequest, order: tuple[int, int], num_groups: int, max_model_len: int, queued_at: float
    ) -> None:
        self.request = request
        self.order = order
        self.queued_at = queued_at
        self.tokens = list(request.prompt_token_ids)
        self.prompt_len = len(self.tokens)
        self.max_length = min(self.prompt_len + request.max_tokens, max_model_len) if request.params else self.prompt_len
        self.min_length = self.prompt_len + (request.params.min_tokens if request.params else 0)
        self.stops = frozenset(request.stop_token_ids)
        self.features = _features(request)
        self.hashes: list[bytes] = []
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.known_prompt_logprobs = False
        self.num_cached_tokens = 0
        self.admitted_at = self.first_token_at = 0.0
        self.finished = False
        self.in_flight = 0
        self.reset(num_groups)

    def reset(self, num_groups: int) -> None:
        """Hold nothing on the device: new, or preempted."""
        self.slot = -1
        self.leaving = False
        self.unread = self.scheduled = self.done = 0
        self.limit = 0
        self.cached = 0
        self.blocks: list[list[int]] = [[] for _ in range(num_groups)]
        self.freed = [0] * num_groups
        if self.features & batch.F_PROMPT_LOGPROBS and not self.known_prompt_logprobs:
            self.prompt_logprobs = [None]

    @property
    def request_id(self) -> str:
        """Id of the engine request."""
        return self.request.request_id

    @property
    def remaining(self) -> int:
        """Tokens that can be computed now; 0 when the last one has been sampled and is not read yet."""
        length = len(self.tokens) + self.unread
        return 0 if self.request.params is not None and length >= self.max_length else length - self.scheduled


def _features(request: EngineRequest) -> int:
    if request.params is None:
        return 0
    bits = request.params.features()
    return bits | batch.F_BAD_WORDS if request.bad_words else bits & ~batch.F_BAD_WORDS
