"""Answers as structs with OpenAI's field names; an unset field does not appear."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, Struct, UnsetType

from vllm_core.outputs import ClassificationRequestOutput, EmbeddingRequestOutput, Logprob, RequestOutput
from vllm_core.serve.stream import Cursor, Delta

LOWEST = -9999.0
"""JSON has no infinities: a token that was masked out has this log-probability."""


PromptLogprobs = list[dict[int, "PromptLogprob"] | None]
"""One entry a token of the prompt: the token and the most likely ones by id. The first has none."""


class PromptLogprob(Struct, frozen=True):
    """Of one token at one place of the prompt."""

    logprob: float
    rank: int
    decoded_token: str | None


class CachedTokens(Struct, frozen=True):
    """Prompt tokens that the prefix cache held."""

    cached_tokens: int


class ReasoningTokens(Struct, frozen=True):
    """Tokens of the output that were reasoning."""

    reasoning_tokens: int


class Usage(Struct, frozen=True):
    """Tokens of one request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens | UnsetType = UNSET


class PoolingUsage(Struct, frozen=True):
    """Tokens of one request that generates nothing."""

    prompt_tokens: int
    total_tokens: int


class Choice(Struct, frozen=True):
    """One sequence of a text completion, or its next piece."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class CompletionLogprobs(Struct, frozen=True):
    """Parallel lists, one entry a token; `text_offset` counts characters of the token texts."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None] | None


class CalledFunction(Struct, frozen=True):
    """Name and arguments of a call, or the next piece of the arguments."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCall(Struct, frozen=True):
    """A call of a function; `index` tells the calls of a stream apart."""

    function: CalledFunction
    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class Message(Struct, frozen=True):
    """What the assistant said, or the next piece of it."""

    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class TokenLogprob(Struct, frozen=True):
    """`bytes` is None where the token is part of a character only."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprobs(TokenLogprob, frozen=True):
    """The chosen token, and the most likely ones."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Struct, frozen=True):
    """One entry a token."""

    content: list[TokenLogprobs]


class ChatChoice(Struct, frozen=True):
    """One sequence of a chat completion: `message` when whole, `delta` in a stream."""

    index: int
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    message: Message | UnsetType = UNSET
    delta: Message | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class Completion(Struct, frozen=True):
    """A text or chat completion, or a chunk of one."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Choice] | list[ChatChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


def usage_of(outputs: list[RequestOutput], reasoning: int | None = None, *, shown: bool = True) -> Usage:
    """Each prompt once, all of its sequences if they are ``shown``; ``reasoning`` tokens of them, where they are told apart."""
    read = sum(len(output.prompt_token_ids) for output in outputs)
    written = sum(len(sequence.token_ids) for output in outputs for sequence in output.outputs) if shown else 0
    cached = CachedTokens(sum(output.num_cached_tokens for output in outputs))
    thought = UNSET if reasoning is None else ReasoningTokens(reasoning)
    return Usage(read, written, read + written, cached, thought)


def pooling_usage(outputs: Sequence[EmbeddingRequestOutput | ClassificationRequestOutput]) -> PoolingUsage:
    """All prompts."""
    count = sum(len(output.prompt_token_ids) for output in outputs)
    return PoolingUsage(count, count)


def prompt_logprobs(output: RequestOutput) -> PromptLogprobs | UnsetType:
    """Those of a prompt, where they were asked for."""
    if output.prompt_logprobs is None:
        return UNSET
    return [
        None
        if entry is None
        else {token: PromptLogprob(max(v.logprob, LOWEST), v.rank, v.decoded_token) for token, v in entry.items()}
        for entry in output.prompt_logprobs
    ]


def completion_logprobs(
    token_ids: list[int], entries: Sequence[dict[int, Logprob] | None], cursor: Cursor, top: int, first: str = ""
) -> CompletionLogprobs:
    """Log-probabilities of tokens; moves the cursor's offset past them. ``first`` is the text of a token without any."""
    offsets: list[int] = []
    values: list[float | None] = []
    tokens: list[str] = []
    tops: list[dict[str, float] | None] = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        text = first if entry is None else _text(token_id, entry[token_id])
        offsets.append(cursor.offset)
        values.append(None if entry is None else max(entry[token_id].logprob, LOWEST))
        tokens.append(text)
        tops.append(
            None if entry is None else {_text(other, value): max(value.logprob, LOWEST) for other, value in entry.items()}
        )
        cursor.offset += len(text)
    return CompletionLogprobs(offsets, values, tokens, tops if top else None)


def joined(one: CompletionLogprobs, other: CompletionLogprobs) -> CompletionLogprobs:
    """Two runs of tokens as one."""
    tops = None if one.top_logprobs is None else one.top_logprobs + (other.top_logprobs or [])
    return CompletionLogprobs(
        one.text_offset + other.text_offset,
        one.token_logprobs + other.token_logprobs,
        one.tokens + other.tokens,
        tops,
    )


def chat_logprobs(delta: Delta, top: int) -> ChatLogprobs:
    """Log-probabilities of the delta's tokens, each with the ``top`` most likely ones."""
    content = []
    for token_id, entry in zip(delta.token_ids, delta.logprobs or (), strict=True):
        likely = sorted((value.rank, other) for other, value in entry.items() if value.rank <= top)
        best = [TokenLogprob(*_token(other, entry[other])) for _, other in likely[:top]]
        content.append(TokenLogprobs(*_token(token_id, entry[token_id]), best))
    return ChatLogprobs(content)


def _token(token_id: int, value: Logprob) -> tuple[str, float, list[int] | None]:
    text = _text(token_id, value)
    return text, max(value.logprob, LOWEST), None if "\ufffd" in text else list(text.encode())


def _text(token_id: int, value: Logprob) -> str:
    return f"token_id:{token_id}" if value.decoded_token is None else value.decoded_token
