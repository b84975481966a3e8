"""Inputs rounded to fp8: judged where they are claimed, refused where they are not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vllm_conformance.cases import op_classes
from vllm_core.api import CAPABILITIES, OPS, Full, Offer, Unsupported
from vllm_core.api.ops import FP8_ACTIVATION
from vllm_core.ops import linear

NAME = "quantization.fp8_activation"
PRODUCTS = ("linear_pack", "linear", "linear_add", "rms_norm_linear", "gated_linear", "rms_norm_gated_linear")


def wrong_scale(weight, bias, readers):
    """A row's scale is taken for that of another format."""
    packed = linear.linear_pack_fp8(weight, bias, readers)
    return replace(packed, weight=packed.weight * 1.5)


def products(pack=f"{linear.__name__}:linear_pack_fp8", **conditions):
    """An own offer of the family linear."""
    return Offer(provider="own", ops={**{name: OPS[name].reference for name in PRODUCTS}, "linear_pack": pack}, **conditions)


ROUNDS = {"features": frozenset({FP8_ACTIVATION})}


@pytest.fixture
def run_op(subject, run_case):
    """Run a class of ``linear`` on an offer."""

    def go(offer, shape="mixed/h512/fp8", seed=0, op="linear"):
        return run_case(subject(own=(offer,)), "ops:run_op", op=op, dtype="float16", shape=shape, seed=seed, layout="")

    return go


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_products_that_round_are_right(run_op, seed):
    assert run_op(products(**ROUNDS), seed=seed, op="gated_linear").outcome == "PASS"


def test_products_that_are_exact_are_right_too(run_op):
    assert run_op(products(OPS["linear_pack"].reference, **ROUNDS)).outcome == "PASS"


def test_products_with_a_wrong_scale_fail(run_op):
    evidence = run_op(products(f"{__name__}:wrong_scale", **ROUNDS))
    assert evidence.outcome == "FAIL"
    assert "argument 0" in evidence.detail


def test_an_offer_that_does_not_round_refuses_and_is_not_forced(run_op):
    """A direct call would be right: it says nothing of rounding."""
    evidence = run_op(products())
    assert evidence.outcome == "REFUSED"
    assert "wanted fp8_activation" in evidence.detail


def test_it_is_asked_where_it_is_claimed_and_in_no_wider_dtype():
    claims = dict.fromkeys(CAPABILITIES, Full())
    for op, dtype, given, asked in (
        ("linear", "bfloat16", claims, True),
        ("rms_norm_gated_linear", "float16", claims, True),
        ("linear", "float32", claims, False),
        ("moe", "bfloat16", claims, False),
        ("linear", "bfloat16", {**claims, NAME: Unsupported("no")}, False),
    ):
        shapes = [run.shape for run in op_classes.runs_of(op, dtype, given)]
        assert any(shape.endswith("/fp8") for shape in shapes) is asked, (op, dtype)


def test_declared_absent_every_offer_must_refuse_it(subject, run_case):
    claims = {**dict.fromkeys(CAPABILITIES, Full()), NAME: Unsupported("by design")}
    refused = run_case(subject(claims=claims, own=(products(),)), "absent:on_ops", capability=NAME)
    assert refused.outcome == "REFUSED"
    accepting = run_case(subject(claims=claims, own=(products(**ROUNDS),)), "absent:on_ops", capability=NAME)
    assert accepting.outcome == "BAD_REFUSAL"
    assert "own accepts linear" in accepting.detail


def test_the_planner_refuses_it_for_the_cpu_platform(cpu, run_case):
    evidence = run_case(cpu, "absent:while_planning", capability=NAME)
    assert evidence.outcome == "REFUSED"
    assert "no CPU multiplies fp8" in evidence.detail
