"""Correctness is computed again: from tokens, distributions, texts and the Plan. Nothing in a file says that it is right."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec.structs import replace as changed

from vllm_core.bench import evidence, judge
from vllm_core.bench.results import Sample, ToolCall
from vllm_core.registry.plan import Demotion

CALL = '{"name": "get_weather", "arguments": {"city": "Lima", "days": 2}}'


def a_sample(tokens: list[int], *, second: float = -3.0, other: int = 9, temperature: float = 0.0) -> Sample:
    """Each token has log-probability -1; `other` comes behind it with `second`."""
    top = [[(token, -1.0), (other, second), (99, -6.0)] for token in tokens]
    return Sample(
        prompt=[1, 2],
        temperature=temperature,
        seed=0,
        tokens=tokens,
        logprobs=[-1.0] * len(tokens),
        top=top,
        prompt_logprobs=[-2.0],
    )


def same(first: Sample, second: Sample, tolerance: str = "float32", *, dummy: bool = False) -> judge.Finding:
    return judge.same([first], [second], tolerance, dummy=dummy)


def with_evidence(result, **changes):
    found = changed(result.evidence, **changes)
    return changed(result, evidence=changed(found, digest=evidence.digest(found)))


def test_what_was_measured_is_right(result) -> None:
    for rule in (judge.whole, judge.greedy, judge.longest, judge.fallback):
        assert not rule(result).problem
    assert not judge.same(result.evidence.alone, result.evidence.together, "float32", dummy=True).problem


def test_edited_tokens_are_noticed_by_their_digest(result) -> None:
    first, *rest = result.evidence.alone
    alone = [changed(first, tokens=[*first.tokens[:-1], 1 + first.tokens[-1]]), *rest]
    edited = changed(result, evidence=changed(result.evidence, alone=alone))
    assert "digest" in judge.whole(edited).problem


def test_a_digest_that_was_edited_too_does_not_make_tokens_right(result) -> None:
    first, *rest = result.evidence.alone
    wrong = changed(first, tokens=first.tokens[::-1], logprobs=[-9.0] * len(first.tokens))
    edited = with_evidence(result, alone=[wrong, *rest])
    assert not judge.whole(edited).problem
    assert "behind the likeliest" in judge.greedy(edited).problem


def test_a_run_without_all_its_tokens_is_noticed(result) -> None:
    row = result.rows[0]
    short = changed(row, runs=[changed(row.runs[0], output_tokens=row.runs[0].output_tokens - 1), *row.runs[1:]])
    assert "seed 1" in judge.whole(changed(result, rows=[short, *result.rows[1:]])).problem


def test_a_result_without_evidence_is_not_whole(result) -> None:
    assert judge.whole(changed(result, evidence=None)).problem


def test_equal_tokens_are_the_same() -> None:
    found = same(a_sample([4, 5, 6]), a_sample([4, 5, 6]))
    assert not found.problem
    assert found.detail.startswith("1 of 1 equal")


def test_tokens_may_part_where_both_are_nearly_as_likely() -> None:
    first, second = a_sample([4, 5, 6], second=-1.001, other=7), a_sample([4, 7, 8], second=-1.001, other=5)
    found = same(first, second)
    assert not found.problem
    assert "1 part at near-ties" in found.detail


def test_tokens_may_not_part_where_one_is_likelier() -> None:
    first = a_sample([4, 5, 6], second=-1.2, other=7)
    second = changed(first, tokens=[4, 7, 8], logprobs=[-1.0, -1.2, -1.0])
    assert "no near-tie" in same(first, second).problem
    assert not same(first, second, "fp8").problem


def test_a_token_that_the_other_does_not_list_is_no_near_tie() -> None:
    assert "no near-tie" in same(a_sample([4, 5]), a_sample([4, 50])).problem


def test_equal_tokens_of_unequal_distributions_are_not_the_same() -> None:
    assert "log-probabilities differ" in same(a_sample([4, 5], second=-3.0), a_sample([4, 5], second=-2.0)).problem


def test_log_probabilities_of_the_prompt_must_agree() -> None:
    assert "of the prompt" in same(a_sample([4]), changed(a_sample([4]), prompt_logprobs=[-2.5])).problem


def test_a_drawn_token_may_be_another_where_the_distributions_agree() -> None:
    first, second = (a_sample([4, token], other=9, temperature=0.8) for token in (5, 6))
    assert "1 where a token was drawn" in same(first, second).detail


def test_near_ties_are_capped_but_for_dummy_weights() -> None:
    first = [a_sample([4, 5], second=-1.001, other=7) for _ in range(8)]
    second = [a_sample([4, 7], second=-1.001, other=5) for _ in range(8)]
    assert "at most 1" in judge.same(first, second, "float32", dummy=False).problem
    assert not judge.same(first, second, "float32", dummy=True).problem


def test_other_requests_are_not_compared() -> None:
    assert "not the same" in same(a_sample([4]), changed(a_sample([4]), prompt=[3])).problem


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (CALL, ""),
        (CALL[:-1], "Expecting"),
        ("[]", "no call"),
        ('{"arguments": {"city": "Lima", "days": 2}}', "no call"),
        (CALL.replace("get_weather", "get_time"), "no call"),
        (CALL.replace("Lima", "Atlantis"), "no call"),
        (CALL.replace("2", '"2"'), "no integer"),
        (CALL.replace("2", "true"), "no integer"),
    ],
)
def test_a_tool_call_is_parsed_again(result, text, problem) -> None:
    found = judge.tool_call(with_evidence(result, tool_call=ToolCall(text=text)))
    assert problem in found.problem
    assert bool(found.problem) == bool(problem)


def test_a_tool_call_that_could_not_be_made_is_no_evidence(result) -> None:
    found = judge.tool_call(with_evidence(result, tool_call=ToolCall(missing="no tokenizer")))
    assert (found.problem, found.missing) == ("", "no tokenizer")


def test_the_longest_context_must_have_been_filled(result) -> None:
    last = result.evidence.longest
    for wrong in (changed(last, prompt_tokens=8), changed(last, tokens=last.tokens[:1]), changed(last, finish_reason="error")):
        assert judge.longest(with_evidence(result, longest=wrong)).problem
    assert judge.same_longest(result, changed(result, max_model_len=9)).missing == ""
    shorter = with_evidence(result, longest=changed(last, prompt_tokens=8))
    assert judge.same_longest(result, shorter).missing


def test_ends_of_equal_contexts_must_agree(result) -> None:
    last = result.evidence.longest
    wrong = with_evidence(result, longest=changed(last, logprobs=[value - 0.5 for value in last.logprobs]))
    assert judge.same_longest(result, wrong).problem


def test_a_demotion_is_a_fallback(result) -> None:
    step = Demotion(op="sample", role="tail", provider="fast", replacement="reference", cause="it failed")
    found = judge.fallback(changed(result, plan=replace(result.plan, demotions=(step,))))
    assert "reference took over" in found.problem


@pytest.mark.parametrize(("kind", "problem"), [("host", "on the host"), ("reference", "")])
def test_an_op_on_the_host_is_a_fallback(result, kind, problem) -> None:
    first, *rest = result.plan.bindings
    found = judge.fallback(changed(result, plan=replace(result.plan, bindings=(replace(first, kind=kind), *rest))))
    assert problem in found.problem
    assert bool(found.problem) == bool(problem)


def test_a_call_site_must_not_go_back_to_the_reference(result) -> None:
    own = next(one for one in result.plan.bindings if one.kind != "reference")
    bindings = tuple(replace(one, kind="reference") if one is own else one for one in result.plan.bindings)
    worse = changed(result, plan=replace(result.plan, bindings=bindings))
    assert own.op in judge.new_references(result, worse).problem
    assert not judge.new_references(worse, result).problem


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "formats", "expected"),
    [
        ("float32", "float32", {}, "float32"),
        ("bfloat16", "bfloat16", {}, "bfloat16"),
        ("bfloat16", "fp8_e4m3", {}, "fp8"),
        ("float32", "float32", {"q4_1": 3}, "int8"),
        ("bfloat16", "int8", {}, "int8"),
    ],
)
def test_the_coarsest_precision_gives_the_tolerance(result, dtype, kv_dtype, formats, expected) -> None:
    plan = replace(result.plan, dtype=dtype, kv_dtype=kv_dtype)
    coarse = changed(result, plan=plan, model=changed(result.model, formats=formats))
    assert judge.precision(coarse) == expected
