"""Input generators of the batch state and of what reads it: random states, and steps packed as the engine packs them.

Classes: ``decode`` schedules one token of requests admitted before and admits nobody, ``chunks`` ends no prompt and so
samples nothing, ``ties`` has logits of few values, ``wide_vocab`` a vocabulary as large models have it.
"""

from __future__ import annotations

import struct
from typing import Any

import torch
from torch import Tensor

from vllm_core.api import batch as layout
from vllm_core.api.batch import BatchState

BATCH_CLASSES = ("one_token", "one_sequence", "mixed", "long")
STEP_CLASSES = (*BATCH_CLASSES, "decode", "chunks")
TAIL_CLASSES = (*BATCH_CLASSES, "ties", "wide_vocab")
_ROWS = {"one_token": 1, "one_sequence": 1, "mixed": 7, "long": 40, "decode": 12, "chunks": 5, "ties": 12, "wide_vocab": 3}
_VOCAB = {"one_token": 97, "one_sequence": 1000, "long": 5000, "wide_vocab": 151_936}
_SMALL_VOCAB = 300
_MAX_LEN, _SIZES = 96, (4, 8)
_BITS = (
    layout.F_RANDOM,
    layout.F_RANDOM | layout.F_FILTER,
    layout.F_PENALTIES | layout.F_BIAS,
    0,
    layout.F_RANDOM | layout.F_FILTER | layout.F_PENALTIES | layout.F_MIN_LEN | layout.F_BAD_WORDS,
    layout.F_BIAS | layout.F_BAD_WORDS,
)


def _bits(value: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


class _Random:
    """Small integers and fractions from one torch generator."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def integer(self, low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=self._generator))

    def fraction(self) -> float:
        return float(torch.rand((), generator=self._generator))

    def tokens(self, count: int, vocab: int) -> list[int]:
        return torch.randint(0, vocab, (count,), generator=self._generator).tolist()

    def slots(self, count: int, among: int) -> list[int]:
        return torch.randperm(among, generator=self._generator)[:count].tolist()

    def normal(self, *size: int) -> Tensor:
        return torch.randn(*size, generator=self._generator)


def empty_state(num_slots: int) -> BatchState:
    """A zeroed state of two KV groups with contexts of 96 tokens."""
    rows = num_slots + 1

    def table(*size: int) -> Tensor:
        return torch.zeros(rows, *size, dtype=torch.int32)

    return BatchState(
        num_slots=num_slots,
        tokens=table(_MAX_LEN + 1),
        computed=table(),
        params=table(layout.ADMIT_WORDS),
        bias_ids=table(layout.MAX_BIAS),
        bias_values=table(layout.MAX_BIAS).float(),
        stop_ids=table(layout.MAX_STOP),
        bad_words=table(layout.MAX_BAD_WORDS),
        block_tables=tuple(table(-(-_MAX_LEN // size) + 1) for size in _SIZES),
        tokens_per_block=_SIZES,
    )


class StepRecipe:
    """A step being packed: every slot of a random choice is admitted and scheduled; admitted before, in ``decode``."""

    def __init__(self, seed: int, shape_class: str) -> None:
        self.random = _Random(seed)
        self.vocab = _VOCAB.get(shape_class, _SMALL_VOCAB)
        self.shape_class = shape_class
        self.num_slots = _ROWS[shape_class] + 3
        self.admits: list[list[int]] = []
        self.tokens: list[int] = []
        self.blocks: list[list[int]] = []
        self.extras: list[list[int]] = []
        self.steps: list[list[int]] = []
        self.max_seq = 0
        for number, slot in enumerate(self.random.slots(_ROWS[shape_class], self.num_slots)):
            self._admit(slot, _BITS[(number + seed) % len(_BITS)])

    def _lengths(self) -> tuple[int, int, int]:
        """Known tokens, computed ones, and those of the step."""
        r = self.random
        match self.shape_class:
            case "one_sequence":
                known = r.integer(2, _MAX_LEN)
                computed = r.integer(0, known)
                return known, computed, known - computed
            case "decode":
                known = r.integer(1, _MAX_LEN)
                return known, known - 1, 1
            case "chunks":
                known = r.integer(3, _MAX_LEN)
                computed = r.integer(0, known - 1)
                return known, computed, r.integer(1, known - computed)
        known = r.integer(1, _MAX_LEN)
        if r.fraction() < 0.6:
            return known, known - 1, 1
        computed = r.integer(0, known)
        return known, computed, r.integer(1, known - computed + 1)

    def _admit(self, slot: int, features: int) -> None:
        r = self.random
        known, computed, count = self._lengths()
        words = r.tokens(known, self.vocab)
        record = [0] * layout.ADMIT_WORDS
        record[layout.A_SLOT], record[layout.A_NUM_KNOWN], record[layout.A_NUM_COMPUTED] = slot, known, computed
        record[layout.A_PROMPT_LEN] = r.integer(1, known + 1)
        record[layout.A_MIN_LEN] = known + r.integer(-2, 3)
        record[layout.A_FEATURES] = features
        record[layout.A_SEED_LOW], record[layout.A_SEED_HIGH] = r.integer(-(2**31), 2**31), r.integer(-(2**31), 2**31)
        self._sampling(record, features)
        self._extras(record, slot, words)
        self.admits.append(record)
        self.tokens += words
        end = computed + count
        for group, size in enumerate(_SIZES):
            self.blocks += [[group, slot, i, r.integer(1, 1000)] for i in range(-(-end // size))]
        self.steps.append([slot, count, int(end == known), 0])
        self.max_seq = max(self.max_seq, end)

    def _sampling(self, record: list[int], features: int) -> None:
        r = self.random
        record[layout.A_TEMPERATURE] = _bits(0.3 + r.fraction() if features & layout.F_RANDOM else 0.0)
        filtered = bool(features & layout.F_FILTER)
        record[layout.A_TOP_K] = r.integer(0, 40) if filtered else 0
        record[layout.A_TOP_P] = _bits(0.3 + 0.7 * r.fraction() if filtered else 1.0)
        record[layout.A_MIN_P] = _bits(0.1 * r.fraction() if filtered else 0.0)
        penalised = bool(features & layout.F_PENALTIES)
        record[layout.A_REPETITION] = _bits(1.0 + r.fraction() if penalised else 1.0)
        record[layout.A_PRESENCE] = _bits(r.fraction() if penalised else 0.0)
        record[layout.A_FREQUENCY] = _bits(r.fraction() - 0.5 if penalised else 0.0)

    def _extras(self, record: list[int], slot: int, words: list[int]) -> None:
        r = self.random
        chosen = r.slots(r.integer(0, 6), self.vocab)
        record[layout.A_NUM_BIAS] = len(chosen)
        self.extras += [[layout.E_BIAS, slot, i, t, _bits(8 * r.fraction() - 4)] for i, t in enumerate(chosen)]
        stops = r.slots(r.integer(0, 4), self.vocab)
        record[layout.A_NUM_STOP] = len(stops)
        self.extras += [[layout.E_STOP, slot, i, t, 0] for i, t in enumerate(stops)]
        forbidden = [[r.integer(0, self.vocab)], [*words[-2:], r.integer(0, self.vocab)], r.tokens(3, self.vocab)]
        ragged = [value for word in forbidden for value in (len(word), *word)]
        record[layout.A_NUM_BAD] = len(ragged)
        self.extras += [[layout.E_BAD_WORD, slot, i, value, 0] for i, value in enumerate(ragged)]

    def packed(self, *, decode: bool = False) -> Tensor:
        """int32 [W]; without what was admitted before, and with a block for the last row, where it is a ``decode``."""
        header = [0] * layout.HEADER_WORDS
        header[layout.H_VERSION] = layout.LAYOUT_VERSION
        sections = (self.admits, [[token] for token in self.tokens], self.blocks, self.extras, self.steps)
        if decode:
            sections = ([], [], self.blocks[-1:], [], self.steps)
        header[layout.H_ADMITTED : layout.H_SCHEDULED + 1] = [len(section) for section in sections]
        counts = [step[1] for step in self.steps]
        header[layout.H_NUM_TOKENS], header[layout.H_MAX_QUERY] = sum(counts), max(counts)
        header[layout.H_NUM_SAMPLED] = sum(step[2] for step in self.steps)
        header[layout.H_MAX_SEQ] = self.max_seq
        return torch.tensor(header + [word for section in sections for row in section for word in row], dtype=torch.int32)

    def arguments(self) -> tuple[Tensor, list[int]]:
        """The packed buffer, and its header on the host."""
        packed = self.packed(decode=self.shape_class == "decode")
        return packed, packed[: layout.HEADER_WORDS].tolist()

    def state(self) -> BatchState:
        """A state to which the step has been applied."""
        from vllm_core.ops.batch import batch_update as apply

        state, packed = empty_state(self.num_slots), self.packed()
        apply(state, packed, packed[: layout.HEADER_WORDS].tolist())
        return state


def batch_update(dtype: str, seed: int, shape_class: str) -> tuple[Any, ...]:
    """A state whose slots were all used before, and a difference that takes most of them anew."""
    before, step = StepRecipe(seed + 1000, shape_class), StepRecipe(seed, shape_class)
    return before.state(), *step.arguments()


def build_step(dtype: str, seed: int, shape_class: str) -> tuple[Any, ...]:
    """A mix of prefill, chunks and decode."""
    step = StepRecipe(seed, shape_class)
    return step.state(), *step.arguments()


def advance(dtype: str, seed: int, shape_class: str) -> tuple[Any, ...]:
    """The step's inputs and a token for each sampled row."""
    from vllm_core.ops.batch import build_step as gather

    step = StepRecipe(seed, shape_class)
    state = step.state()
    inputs = gather(state, *step.arguments())
    tokens = torch.tensor(step.random.tokens(len(inputs.sample_slots), step.vocab), dtype=torch.int32)
    return state, inputs, tokens.view(-1, 1)


def _rows(step: StepRecipe) -> tuple[BatchState, Tensor, Tensor, int]:
    records = step.admits
    slots = torch.tensor([record[layout.A_SLOT] for record in records])
    lengths = torch.tensor([record[layout.A_NUM_KNOWN] for record in records], dtype=torch.int32)
    features = 0
    for record in records:
        features |= record[layout.A_FEATURES]
    return step.state(), slots, lengths, features


def logit_adjust(dtype: str, seed: int, shape_class: str) -> tuple[Any, ...]:
    """Rows with every feature, and rows with none."""
    step = StepRecipe(seed, shape_class)
    state, slots, lengths, features = _rows(step)
    return step.random.normal(len(slots), step.vocab) * 3, state, slots, lengths, features


def sample(dtype: str, seed: int, shape_class: str) -> tuple[Any, ...]:
    """Greedy, plain and filtered rows; every fifth seed has a row that is not finite."""
    step = StepRecipe(seed, shape_class)
    state, slots, lengths, features = _rows(step)
    logits = step.random.normal(len(slots), step.vocab) * 3
    if shape_class == "ties":
        logits = logits.round()
    if seed % 5 == 4:
        logits[-1, seed % step.vocab] = (float("nan"), float("inf"))[seed // 5 % 2]
    tokens = torch.zeros(len(slots), 1, dtype=torch.int32)
    return tokens, torch.zeros(len(slots), dtype=torch.bool), logits, state, slots, lengths, features
