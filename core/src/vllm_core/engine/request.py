"""The scheduler's own record of a sequence."""

from __future__ import annotations

from vllm_core.api import batch
from vllm_core.engine.messages import EngineRequest, TokenLogprobs
from vllm_core.engine.structured.constraint import Constraint


class Request:
    """One sequence between `add` and its last update.

    tokens     known tokens: prompt, then output that has been read
    length     tokens there will be once the steps in flight are read, at most
    scheduled  tokens whose KV is written, or will be by steps in flight
    done       tokens whose KV is written by steps that have been read
    last_step  number of the last step that may touch the blocks
    limit      tokens that the blocks hold
    settle_at  value of `done` from which a block is full, or left by its window
    look_at    value of `len(tokens)` from which more is to be done than handing a token over: the first, the last
    leaving    no longer running, but steps in flight may still touch its blocks
    constraint  where it stands in the grammar of its output, if that has one
    is_pooling  the prompt becomes a vector; no token is sampled
    """

    __slots__ = (
        "admitted_at",
        "blocks",
        "cached",
        "constraint",
        "done",
        "features",
        "finished",
        "first_token_at",
        "freed",
        "hashes",
        "is_pooling",
        "last_step",
        "leaving",
        "length",
        "limit",
        "look_at",
        "max_length",
        "min_length",
        "num_cached_tokens",
        "order",
        "prompt_len",
        "prompt_logprobs",
        "queued_at",
        "request",
        "request_id",
        "scheduled",
        "settle_at",
        "slot",
        "stops",
        "tokens",
        "wants_prompt_logprobs",
    )

    def __init__(
        self, request: EngineRequest, order: tuple[int, int], num_groups: int, max_model_len: int, queued_at: float
    ) -> None:
        self.request = request
        self.request_id = request.request_id
        self.is_pooling = request.params is None
        self.order = order
        self.queued_at = queued_at
        self.tokens = list(request.prompt_token_ids)
        self.prompt_len = len(self.tokens)
        # A prompt that is pooled never reaches its limit: it ends with its vector.
        self.max_length = min(self.prompt_len + request.max_tokens, max_model_len) if request.params else self.prompt_len + 1
        self.look_at = self.prompt_len + 1
        self.constraint: Constraint | None = None
        self.min_length = self.prompt_len + (request.params.min_tokens if request.params else 0)
        self.stops = frozenset(request.stop_token_ids)
        self.features = _features(request)
        self.hashes: list[bytes] = []
        self.wants_prompt_logprobs = bool(self.features & batch.F_PROMPT_LOGPROBS)
        self.num_cached_tokens = 0
        self.admitted_at: float | None = None
        self.first_token_at: float | None = None
        self.finished = False
        self.last_step = 0
        self.reset(num_groups)

    def constrain(self, constraint: Constraint) -> None:
        """Follow a grammar, which looks at every token."""
        self.constraint, self.look_at = constraint, 0

    def reset(self, num_groups: int) -> None:
        """Hold nothing on the device: new, or preempted."""
        self.slot = -1
        self.leaving = False
        self.length = len(self.tokens)
        self.scheduled = self.done = self.settle_at = 0
        self.limit = 0
        self.cached = 0
        self.blocks: list[list[int]] = [[] for _ in range(num_groups)]
        self.freed = [0] * num_groups
        self.prompt_logprobs: list[TokenLogprobs | None] = [None]


def _features(request: EngineRequest) -> int:
    if request.params is None:
        return 0
    bits = request.params.features()
    return bits | batch.F_BAD_WORDS if request.bad_words else bits & ~batch.F_BAD_WORDS
