"""The batch state's references against a plain Python model."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_core.api import batch as layout
from vllm_core.ops import batch
from vllm_core.ops.batch_inputs import StepRecipe

_CLASSES = st.sampled_from(["one_token", "one_sequence", "mixed"])


def _apply(step):
    """What a step's difference says, as dictionaries."""
    tokens, at = {}, 0
    for record in step.admits:
        count = record[layout.A_NUM_KNOWN]
        tokens[record[layout.A_SLOT]] = step.tokens[at : at + count]
        at += count
    tables = {(group, slot, index): block for group, slot, index, block in step.blocks}
    computed = {record[layout.A_SLOT]: record[layout.A_NUM_COMPUTED] for record in step.admits}
    return tokens, tables, computed


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), _CLASSES)
def test_update_and_build_equal_a_plain_model(seed, shape_class) -> None:
    step = StepRecipe(seed, shape_class)
    state = StepRecipe(seed + 1, shape_class).state()
    batch.batch_update(state, *step.arguments())
    got = batch.build_step(state, *step.arguments())
    tokens, tables, computed = _apply(step)
    ids, positions, slots, lengths, sampled = [], [], [], [], []
    mapping: list[list[int]] = [[] for _ in state.tokens_per_block]
    for slot, count, is_sampled, _ in step.steps:
        for at in range(computed[slot], computed[slot] + count):
            ids.append(tokens[slot][at])
            positions.append(at)
            for group, size in enumerate(state.tokens_per_block):
                mapping[group].append(tables[group, slot, at // size] * size + at % size)
        slots.append(slot)
        lengths.append(computed[slot] + count)
        if is_sampled:
            sampled.append((len(ids) - 1, slot))
    assert got.token_ids.tolist() == ids
    assert got.positions.tolist() == positions
    assert got.slots.tolist() == slots
    assert got.seq_lens.tolist() == lengths
    assert list(zip(got.sample_rows.tolist(), got.sample_slots.tolist(), strict=True)) == sampled
    assert got.sample_lengths.tolist() == [n for n, row in zip(lengths, step.steps, strict=True) if row[2]]
    assert [m.tolist() for m in got.slot_mapping] == mapping
    for group, table in enumerate(got.block_tables):
        for row, slot in enumerate(slots):
            assert table[row].tolist() == [tables.get((group, slot, i), 0) for i in range(table.shape[1])]


def test_an_admitted_slot_keeps_nothing_of_its_last_owner() -> None:
    step = StepRecipe(5, "one_sequence")
    state = step.state()
    for table in state.block_tables:
        table.fill_(77)
    batch.batch_update(state, *step.arguments())
    slot, used = step.steps[0][0], {(group, index) for group, _, index, _ in step.blocks}
    for group, table in enumerate(state.block_tables):
        assert [i for i, block in enumerate(table[slot].tolist()) if block] == sorted(i for g, i in used if g == group)
        others = [row for row in range(state.num_slots) if row != slot]
        assert bool((table[others] == 77).all())


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), _CLASSES)
def test_advance_appends_each_sampled_token_once(seed, shape_class) -> None:
    step = StepRecipe(seed, shape_class)
    state = step.state()
    got = batch.build_step(state, *step.arguments())
    before = state.tokens.clone()
    new = torch.arange(len(got.sample_slots), dtype=torch.int32)[:, None] + 10**6
    batch.advance(state, got, new)
    for number, slot in enumerate(got.sample_slots.tolist()):
        length = int(state.computed[slot])
        assert int(state.tokens[slot, length]) == 10**6 + number
        before[slot, length] = 10**6 + number
    assert torch.equal(state.tokens[: state.num_slots], before[: state.num_slots])
    assert state.computed[got.slots.long()].tolist() == got.seq_lens.tolist()


def test_a_token_that_does_not_fit_goes_nowhere() -> None:
    step = StepRecipe(1, "one_sequence")
    state = step.state()
    got = batch.build_step(state, *step.arguments())
    got.seq_lens.fill_(state.tokens.shape[1])
    before = state.tokens.clone()
    batch.advance(state, got, torch.full((len(got.sample_slots), 1), 9, dtype=torch.int32))
    assert torch.equal(state.tokens[: state.num_slots], before[: state.num_slots])
