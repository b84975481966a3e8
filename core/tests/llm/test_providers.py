"""A kernel package whose kernels fail: warm-up takes the next provider, and what the user asked for is kept or raises."""

from __future__ import annotations

import pytest

from vllm_core import SamplingParams
from vllm_core.engine.binding import ProviderFailedError
from vllm_core.errors import PlanError

PROMPT = [(17 * i + 2) % 250 for i in range(30)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
RAISES = """
from vllm_core.ops.linear import linear_pack

def fail(*arguments):
    raise RuntimeError("no kernel for this shape")
"""
DECODE_FAILS = """
from vllm_core.ops.norm import rms_norm as reference

def rms_norm(out, x, weight, eps):
    if x.numel() // x.shape[-1] == 1:
        raise RuntimeError("one row is too few")
    reference(out, x, weight, eps)
"""
DECORATED = """
from vllm_core.ops import activation, embedding as embeddings

def checked(function):
    def call(*arguments):
        if function is embeddings.embedding:
            raise RuntimeError("no kernel for this shape")
        return function(*arguments)
    return call

embedding = checked(embeddings.embedding)
gated_activation = checked(activation.gated_activation)
"""
# name: ops of the package, role at which they are demoted
CASES = {
    "rms_norm": ({"rms_norm": "fail"}, "norm"),
    "linear": ({"linear_pack": "linear_pack", "linear": "fail"}, "linear"),
    "linear_pack": ({"linear_pack": "fail", "linear": "fail"}, "linear"),
    "sample": ({"sample": "fail"}, "tail"),
    "log_probabilities": ({"log_probabilities": "fail"}, "tail"),
    "grammar_mask": ({"grammar_mask": "fail"}, "tail"),
}


@pytest.mark.parametrize("name", CASES)
def test_warm_up_takes_the_next_provider_and_the_plan_records_it(llama, engines, site, run, name):
    ops, role = CASES[name]
    site.kernels("broken", ops, RAISES)
    llm = engines(llama)
    assert {(op, role, "broken") for op in ops} <= {(d.op, d.role, d.provider) for d in llm.plan.demotions}
    assert all("no kernel for this shape" in d.cause for d in llm.plan.demotions)
    assert all(llm.plan.binding(op, role).provider != "broken" for op in ops)
    assert run(llm, [PROMPT], GREEDY) == [llama.greedy(PROMPT, 8)]


def test_a_provider_that_fails_on_decodes_alone_is_found_in_warm_up(llama, engines, site, run):
    site.kernels("broken", {"rms_norm": "rms_norm"}, DECODE_FAILS)
    llm = engines(llama)
    assert {d.cause for d in llm.plan.demotions} == {"RuntimeError: one row is too few"}
    assert run(llm, [PROMPT], GREEDY) == [llama.greedy(PROMPT, 8)]


def test_a_provider_whose_module_cannot_be_imported_is_demoted(llama, engines, site, run):
    site.kernels("broken", {"rms_norm": "rms_norm"}, "import a_library_that_is_not_there")
    llm = engines(llama)
    assert {(d.op, d.provider) for d in llm.plan.demotions} == {("rms_norm", "broken")}
    assert "a_library_that_is_not_there" in llm.plan.demotions[0].cause
    assert run(llm, [PROMPT], GREEDY) == [llama.greedy(PROMPT, 8)]


def test_a_provider_that_does_not_take_the_arguments_of_the_schema_is_demoted(llama, engines, site, run):
    site.kernels("broken", {"rms_norm": "rms_norm"}, "def rms_norm(out, x, weight): ...")
    llm = engines(llama)
    assert {d.cause for d in llm.plan.demotions} == {"TypeError: too many positional arguments"}
    assert run(llm, [PROMPT], GREEDY) == [llama.greedy(PROMPT, 8)]


def test_strict_raises_and_names_the_provider(llama, engines, site):
    site.kernels("broken", {"rms_norm": "fail"}, RAISES)
    with pytest.raises(ProviderFailedError, match=r"rms_norm at .*, provider broken") as caught:
        engines(llama, strict=True)
    assert "no kernel for this shape" in caught.value.found


def test_the_role_that_failed_is_named(llama, engines, site):
    """This model never calls the norm that is bound for composing fused KV writes."""
    site.kernels("broken", {"rms_norm": "fail"}, RAISES)
    with pytest.raises(ProviderFailedError, match="rms_norm at norm, provider broken"):
        engines(llama, strict=True)


def test_ops_wrapped_by_one_decorator_are_told_apart(llama, engines, site, run):
    site.kernels("broken", {"embedding": "embedding", "gated_activation": "gated_activation"}, DECORATED)
    llm = engines(llama)
    assert [(d.op, d.provider) for d in llm.plan.demotions] == [("embedding", "broken")]
    assert run(llm, [PROMPT], GREEDY) == [llama.greedy(PROMPT, 8)]


def test_a_denied_provider_is_never_called(llama, engines, site, run):
    site.kernels("broken", {"rms_norm": "fail"}, RAISES)
    llm = engines(llama, deny_provider=["broken"])
    assert llm.plan.demotions == ()
    assert any(r.candidate == "broken" and r.reason == "denied by the user" for r in llm.plan.rejected)
    assert run(llm, [PROMPT], GREEDY) == [llama.greedy(PROMPT, 8)]


def test_a_forced_provider_has_no_replacement(llama, engines, site):
    site.kernels("broken", {"rms_norm": "fail"}, RAISES)
    with pytest.raises(PlanError, match="provider broken") as caught:
        engines(llama, provider={"rms_norm": "broken"})
    assert "no kernel for this shape" in caught.value.found


@pytest.mark.parametrize("track", ["agnostic", "transformers"])
def test_a_working_package_serves_what_it_offers_whichever_track_runs_the_model(llama, engines, site, run, track):
    """field-reports 17: one path of two had a registry of its own, and dropped what plugins brought."""
    site.kernels("good", {"gather_rows": "gather_rows"}, "from vllm_core.ops.embedding import gather_rows")
    llm = engines(llama, model_impl=track)
    assert {b.op for b in llm.plan.bindings if b.provider == "good"} == {"gather_rows"}
    assert run(llm, [PROMPT], GREEDY) == [llama.greedy(PROMPT, 8)]


def test_all_references_give_the_same_tokens(gemma, engines, run):
    llm = engines(gemma, provider={"all": "reference"})
    assert {b.kind for b in llm.plan.bindings} == {"reference"}
    assert run(llm, [PROMPT], GREEDY) == [gemma.greedy(PROMPT, 8)]


def test_an_unknown_provider_is_an_error_with_the_nearest(llama, engines):
    with pytest.raises(PlanError, match="did you mean 'reference'"):
        engines(llama, provider={"rms_norm": "referense"})
    with pytest.raises(PlanError, match="'nobody'"):
        engines(llama, deny_provider=["nobody"])
