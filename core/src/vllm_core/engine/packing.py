"""The packed difference of one step, as `vllm_core.api.batch` lays it out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from vllm_core.api import batch
from vllm_core.engine.request import Request

if TYPE_CHECKING:
    import numpy.typing as npt

_FLOATS = (
    (batch.A_TEMPERATURE, "temperature"),
    (batch.A_TOP_P, "top_p"),
    (batch.A_MIN_P, "min_p"),
    (batch.A_REPETITION, "repetition_penalty"),
    (batch.A_PRESENCE, "presence_penalty"),
    (batch.A_FREQUENCY, "frequency_penalty"),
)


FEW_ROWS = 16
"""Rows up to which a step that only decodes is laid out as a list."""


@dataclass(slots=True)
class Rows:
    """The rows of one step, in order. Nearly all decode: `chunks` has what the others do, by index: (tokens, sampled)."""

    requests: list[Request] = field(default_factory=list)
    chunks: dict[int, tuple[int, bool]] = field(default_factory=dict)
    features: int = 0
    counts: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    max_seq: int = 0

    def close(self) -> None:
        """Fill the columns, once all rows are there."""
        self.counts = [1] * len(self.requests)
        self.sampled = [True] * len(self.requests)
        for index, (count, sampled) in self.chunks.items():
            self.counts[index], self.sampled[index] = count, sampled
        self.max_seq = max([request.scheduled for request in self.requests])

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[tuple[Request, int, bool]]:
        """Each row's request, number of tokens, and whether it brings a token."""
        return zip(self.requests, self.counts, self.sampled, strict=True)


def pack(
    admitted: Sequence[tuple[Request, int]], blocks: Sequence[tuple[int, int, int, int]], rows: Rows
) -> npt.NDArray[np.int32]:
    """Lay out a step: admitted requests with the tokens they found cached, new block table entries, and the rows."""
    if not (admitted or blocks or rows.chunks) and len(rows) <= FEW_ROWS:
        return _few_decodes(rows)
    extras = [extra for request, _ in admitted for extra in _extras(request)]
    known = sum(len(request.tokens) for request, _ in admitted)
    num_rows = len(rows)
    sizes = (len(admitted) * batch.ADMIT_WORDS, known, 4 * len(blocks), 5 * len(extras), 4 * num_rows)
    words = np.zeros(batch.HEADER_WORDS + sum(sizes), dtype=np.int32)
    at = batch.HEADER_WORDS
    for request, cached in admitted:
        _admit(words[at : at + batch.ADMIT_WORDS], request, cached)
        at += batch.ADMIT_WORDS
    for request, _ in admitted:
        words[at : at + len(request.tokens)] = request.tokens
        at += len(request.tokens)
    for flat in (blocks, extras):
        if flat:
            values = list(chain.from_iterable(flat))
            words[at : at + len(values)] = values
            at += len(values)
    steps = words[at:].reshape(-1, 4)
    steps[:, 0] = [request.slot for request in rows.requests]
    steps[:, 1] = rows.counts if rows.chunks else 1
    steps[:, 2] = rows.sampled if rows.chunks else 1
    words[: batch.H_MAX_SEQ + 1] = (
        batch.LAYOUT_VERSION,
        len(admitted),
        known,
        len(blocks),
        len(extras),
        num_rows,
        sum(rows.counts),
        sum(rows.sampled),
        max(rows.counts),
        rows.max_seq,
    )
    return words


def _few_decodes(rows: Rows) -> npt.NDArray[np.int32]:
    """The buffer of a step that only decodes: for few rows one list is faster than filling columns."""
    count = len(rows)
    words = [batch.LAYOUT_VERSION, 0, 0, 0, 0, count, count, count, 1, rows.max_seq, 0, 0, 0, 0, 0, 0]
    for request in rows.requests:
        words += (request.slot, 1, 1, 0)
    return np.array(words, dtype=np.int32)


def _admit(record: npt.NDArray[np.int32], request: Request, cached: int) -> None:
    source = request.request
    seed = source.seed % 2**64
    record[: batch.A_PROMPT_LEN + 1] = (request.slot, len(request.tokens), cached, request.prompt_len)
    record.view(np.uint32)[batch.A_SEED_LOW : batch.A_SEED_HIGH + 1] = (seed & 0xFFFFFFFF, seed >> 32)
    record[batch.A_FEATURES] = request.features
    params = source.params
    if params is None:
        return
    record[batch.A_MIN_LEN] = request.prompt_len + params.min_tokens
    record[batch.A_TOP_K] = max(0, params.top_k)
    record[batch.A_NUM_STOP] = len(source.stop_token_ids) if params.min_tokens else 0
    record[batch.A_NUM_BIAS] = len(params.logit_bias or ())
    record[batch.A_NUM_BAD] = sum(len(word) + 1 for word in source.bad_words)
    floats = record.view(np.float32)
    for column, name in _FLOATS:
        floats[column] = getattr(params, name)
    if params.is_greedy:
        floats[batch.A_TEMPERATURE] = 0.0


def _extras(request: Request) -> list[tuple[int, int, int, int, int]]:
    source, slot = request.request, request.slot
    params = source.params
    if params is None:
        return []
    rows = [
        (batch.E_BIAS, slot, index, token, int(np.float32(value).view(np.int32)))
        for index, (token, value) in enumerate((params.logit_bias or {}).items())
    ]
    if params.min_tokens:
        rows += [(batch.E_STOP, slot, index, token, 0) for index, token in enumerate(source.stop_token_ids)]
    words = chain.from_iterable((len(word), *word) for word in source.bad_words)
    rows += [(batch.E_BAD_WORD, slot, index, value, 0) for index, value in enumerate(words)]
    return rows
