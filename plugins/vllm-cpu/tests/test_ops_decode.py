"""Pure decode steps keep their tensors from step to step: what they hold must still be what the reference gathers."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from vllm_core.api import StepInputs
from vllm_core.api import batch as layout
from vllm_core.ops import batch as reference
from vllm_core.ops.batch_inputs import empty_state
from vllm_cpu.ops import batch as own
from vllm_cpu.ops.decode import FEW

SLOTS = 24


def random_state(seed: int) -> layout.BatchState:
    generator = torch.Generator().manual_seed(seed)
    state = empty_state(SLOTS)
    for tensor in (state.tokens, *state.block_tables):
        tensor.copy_(torch.randint(1, 500, tensor.shape, generator=generator))
    state.computed.copy_(torch.randint(0, 40, state.computed.shape, generator=generator))
    return state


def copy_of(state: layout.BatchState) -> layout.BatchState:
    def copied(value: object) -> object:
        if isinstance(value, torch.Tensor):
            return value.clone()
        return tuple(map(copied, value)) if isinstance(value, tuple) else value

    return layout.BatchState(*(copied(getattr(state, field.name)) for field in fields(state)))


def decode_step(state: layout.BatchState, slots: list[int], blocks: list[tuple[int, int, int, int]] = ()) -> torch.Tensor:
    """A step with one sampled token for each slot."""
    longest = int(state.computed[slots].max()) + 1
    header = [layout.LAYOUT_VERSION, 0, 0, len(blocks), 0, len(slots), len(slots), len(slots), 1, longest]
    header += [0] * (layout.HEADER_WORDS - len(header))
    steps = [word for slot in slots for word in (slot, 1, 1, 0)]
    return torch.tensor([*header, *(word for row in blocks for word in row), *steps], dtype=torch.int32)


def build(ops, state, packed) -> StepInputs:
    header = packed[: layout.HEADER_WORDS].tolist()
    ops.batch_update(state, packed, header)
    return ops.build_step(state, packed, header)


def assert_same(own_value: object, expected: object, name: str) -> None:
    if isinstance(expected, tuple):
        for mine, theirs in zip(own_value, expected, strict=True):
            assert_same(mine, theirs, name)
    elif isinstance(expected, torch.Tensor):
        assert own_value.dtype == expected.dtype, name
        assert torch.equal(own_value, expected), name
    else:
        assert own_value == expected, name


def assert_same_inputs(mine: StepInputs, theirs: StepInputs) -> None:
    for field in fields(StepInputs):
        assert_same(getattr(mine, field.name), getattr(theirs, field.name), field.name)


@pytest.mark.parametrize("count", [1, 2, FEW, FEW + 1, 20])
def test_step_after_step_the_inputs_are_those_of_the_reference(count) -> None:
    state = random_state(count)
    twin = copy_of(state)
    generator = torch.Generator().manual_seed(count)
    slots = torch.randperm(SLOTS, generator=generator)[:count].tolist()
    for number in range(30):
        if number % 7 == 6:  # other requests, as many
            slots = torch.randperm(SLOTS, generator=generator)[:count].tolist()
        blocks = [(0, slots[0], 3, 600 + number), (1, slots[-1], 2, 700 + number)] if number % 3 == 2 else []
        packed = decode_step(state, slots, blocks)
        mine, theirs = build(own, state, packed), build(reference, twin, packed)
        assert_same_inputs(mine, theirs)
        tokens = torch.randint(0, 1000, (count, 1), generator=generator, dtype=torch.int32)
        own.advance(state, mine, tokens)
        reference.advance(twin, theirs, tokens)
        assert torch.equal(state.tokens[:SLOTS], twin.tokens[:SLOTS])
        assert torch.equal(state.computed, twin.computed)


def test_rows_come_and_go_between_steps() -> None:
    state = random_state(3)
    twin = copy_of(state)
    for slots in ([4], [4, 5], [4], [9], list(range(12)), list(range(1, 12)), [11, 4]):
        packed = decode_step(state, slots)
        mine, theirs = build(own, state, packed), build(reference, twin, packed)
        assert_same_inputs(mine, theirs)
        own.advance(state, mine, torch.full((len(slots), 1), 8, dtype=torch.int32))
        reference.advance(twin, theirs, torch.full((len(slots), 1), 8, dtype=torch.int32))
        assert torch.equal(state.computed, twin.computed)


def test_states_do_not_share_what_is_kept() -> None:
    first, second = random_state(5), random_state(6)
    mine = build(own, first, decode_step(first, [1, 2]))
    build(own, second, decode_step(second, [1, 2]))
    assert_same_inputs(mine, build(reference, copy_of(first), decode_step(first, [1, 2])))


@pytest.mark.parametrize("count", [2, FEW + 1])
def test_a_token_beyond_the_context_is_dropped(count) -> None:
    state = random_state(7)
    width = state.tokens.shape[1]
    slots = list(range(count))
    state.computed[0] = width - 1  # the sampled token would be the first that does not fit
    before = state.tokens.clone()
    inputs = build(own, state, decode_step(state, slots))
    own.advance(state, inputs, torch.full((count, 1), -5, dtype=torch.int32))
    assert torch.equal(state.tokens[0], before[0])
    assert (state.tokens == -5).sum() == count - 1
    assert int(state.computed[0]) == width
