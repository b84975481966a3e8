"""A sampled token that differs is forgiven where rounding decides, and nowhere else."""

from __future__ import annotations

import torch

from vllm_core.api import batch as layout
from vllm_core.ops import check, inputs
from vllm_core.ops.batch_inputs import _bits
from vllm_core.ops.check import judge
from vllm_core.ops.random import uniform
from vllm_core.ops.ties import WIDTH, is_tie

LENGTH = 9


def request(features=layout.F_RANDOM, **values):
    params = torch.zeros(layout.ADMIT_WORDS, dtype=torch.int32)
    params[layout.A_FEATURES] = features
    for name, value in {"A_TEMPERATURE": 1.0, "A_TOP_P": 1.0, **values}.items():
        params[getattr(layout, name)] = _bits(value) if isinstance(value, float) else value
    return params


def draw():
    zero = torch.zeros(1, dtype=torch.int32)
    return float(uniform(zero, zero, torch.tensor([LENGTH])))


def at_boundary(distance):
    """Logits of two tokens whose border lies ``distance`` below the draw."""
    first = draw() - distance
    return torch.tensor([first, 1 - first]).log()


def test_a_draw_on_a_border_is_a_tie_for_both_neighbours():
    logits = at_boundary(WIDTH / 10)
    assert is_tie(logits, request(), LENGTH, 0)
    assert is_tie(logits, request(), LENGTH, 1)


def test_a_draw_off_the_border_is_not():
    logits = at_boundary(WIDTH * 10)
    assert not is_tie(logits, request(), LENGTH, 0)
    assert is_tie(logits, request(), LENGTH, 1), "the right token needs no forgiving"


def test_greedy_has_no_ties():
    assert not is_tie(torch.zeros(4), request(A_TEMPERATURE=0.0), LENGTH, 1)


def test_a_token_that_does_not_exist_is_no_tie():
    assert not is_tie(torch.zeros(4), request(), LENGTH, 4)
    assert not is_tie(torch.zeros(4), request(), LENGTH, -1)


def test_a_token_that_a_filter_drops_is_no_tie():
    logits = torch.tensor([0.0, 5.0, 5.0])
    assert not is_tie(logits, request(layout.F_RANDOM | layout.F_FILTER, A_TOP_K=2), LENGTH, 0)


def test_a_threshold_of_top_p_may_move_by_rounding():
    """The second token is in the set or not as the last bit of the first's probability says."""
    logits = torch.tensor([0.6, 0.4]).log()
    params = request(layout.F_RANDOM | layout.F_FILTER, A_TOP_P=0.6)
    assert is_tie(logits, params, LENGTH, 0)
    near = [token for token in (0, 1) if is_tie(logits, params, LENGTH, token)]
    far = [token for token in (0, 1) if is_tie(logits, request(layout.F_RANDOM | layout.F_FILTER, A_TOP_P=0.5), LENGTH, token)]
    assert far == [0]
    assert set(near) >= set(far)


def test_the_judge_counts_ties_and_keeps_other_differences(monkeypatch):
    oracle = check.reference()

    def off_by_one(tokens, nonfinite, *rest):
        oracle.ops["sample"](tokens, nonfinite, *rest)
        tokens[0] += 1

    provider = check.Provider({**oracle.ops, "sample": off_by_one})
    assert judge("sample", provider, "float32", 0, "mixed").problems
    monkeypatch.setattr(check, "is_tie", lambda *arguments: True)
    forgiven = judge("sample", provider, "float32", 0, "mixed")
    assert (forgiven.problems, forgiven.ties) == ([], 1)


def test_right_tokens_are_what_the_rule_accepts():
    """The reference's own tokens are within the rule, for every random row of some seeds."""
    for seed in range(6):
        tokens, flags, logits, state, slots, lengths, features = inputs.sample("float32", seed, "mixed")
        check.reference().ops["sample"](tokens, flags, logits, state, slots, lengths, features)
        for row, slot in enumerate(slots.tolist()):
            params = state.params[slot]
            if params.view(torch.float32)[layout.A_TEMPERATURE] > 0 and not flags[row]:
                assert is_tie(logits[row], params, int(lengths[row]), int(tokens[row, 0]))
