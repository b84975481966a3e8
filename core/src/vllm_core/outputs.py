"""What a user gets back, with the field names that users of vLLM know."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

Pooled = TypeVar("Pooled")


@dataclass(slots=True)
class Logprob:
    """Natural log-probability of one token, its rank (1 = most likely), and its text."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence. `finish_reason` is ``stop``, ``length``, ``abort`` or ``error``; None while running."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        """Whether no more tokens will come."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """All that is known of one request now; cumulative."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class EmbeddingOutput:
    """One vector, float32."""

    embedding: list[float]


@dataclass(slots=True)
class ClassificationOutput:
    """The probability of each class, in the order of the model's; of a regression its values."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """How many classes the model has."""
        return len(self.probs)


@dataclass(slots=True)
class PoolingRequestOutput(Generic[Pooled]):
    """What a model that does not generate made of one prompt."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: Pooled
    finished: bool = True
    error: str | None = None


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """The classes of one prompt."""

    __slots__ = ()


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """The vector of one prompt."""

    __slots__ = ()


@dataclass(slots=True)
class ScoringOutput:
    """How alike two prompts are: the cosine of their vectors."""

    score: float


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """The score of one pair; the token ids are those of both."""

    __slots__ = ()
