"""The merges that a vocabulary implies are those of the rule written plainly, in its order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_core.loader.implied_merges import implied_merges

TEXT = st.text(alphabet="ab\x00\u2581\U0001f600", max_size=5)
"""Few characters, so that most cuts are tokens; one of code 0, and one beyond 16 bits."""


def by_rule(tokens, scores):
    vocab = {token: index for index, token in enumerate(tokens)}
    found = [
        (token[:cut], token[cut:])
        for token in tokens
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    if scores is not None:
        found.sort(key=lambda pair: (-scores[vocab["".join(pair)]], -len(pair[0]), -len(pair[1])))
    return found


@given(st.lists(TEXT, min_size=1, max_size=60, unique=True))
def test_without_scores_the_order_is_that_of_the_vocabulary(tokens):
    assert implied_merges(tokens, None) == by_rule(tokens, None)


@given(st.lists(TEXT, min_size=1, max_size=60, unique=True), st.data())
def test_the_best_token_comes_first_then_the_longest_left_part(tokens, data):
    scores = data.draw(st.lists(st.sampled_from([-2.0, -1.0, 0.0]), min_size=len(tokens), max_size=len(tokens)))
    assert implied_merges(tokens, scores) == by_rule(tokens, scores)


def test_a_token_that_no_two_others_make_has_no_merge():
    assert implied_merges(["", "a", "b", "abc", "ab"], None) == [("a", "b")]
