"""Products with packed weights: judged in every format that is offered, refused in the others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vllm_conformance.cases import op_classes
from vllm_core.api import CAPABILITIES, FORMATS, OPS, Full, Offer, Partial, QuantTensor, Unsupported, UnsupportedError
from vllm_core.ops import linear

NAME = "quantization.weight_only"
SOME = Partial("some formats", cases=("int8_channel",))
PRODUCTS = ("linear_pack", "linear", "linear_add", "rms_norm_linear", "gated_linear", "rms_norm_gated_linear")


def int8_alone(weight, bias, readers):
    """Reads one format."""
    if isinstance(weight, QuantTensor) and weight.format != "int8_channel":
        raise UnsupportedError("Format", on="linear_pack", found=weight.format, expected="int8_channel", fix="decode it")
    return linear.linear_pack(weight, bias, readers)


def without_scales(weight, bias, readers):
    """Codes taken for numbers."""
    return replace(linear.linear_pack(weight, bias, readers), weight=weight.data.float())


def products(pack, *formats):
    """An own offer of the family linear."""
    ops = {**{name: OPS[name].reference for name in PRODUCTS}, "linear_pack": f"{__name__}:{pack}"}
    return Offer(provider="own", ops=ops, formats=frozenset({"plain", *formats}))


@pytest.fixture
def run_op(subject, run_case):
    """Run the class of a format on an offer, or on core's references, of a platform that claims some formats, or another."""

    def go(own, name, op="linear", claim=SOME):
        platform = subject(own=own, claims={**dict.fromkeys(CAPABILITIES, Full()), NAME: claim})
        return run_case(platform, "ops:run_op", op=op, dtype="float16", shape=f"mixed/h512/{name}", seed=1, layout="")

    return go


@pytest.mark.parametrize("op", ["linear", "gated_linear"])
def test_a_format_that_is_offered_is_judged_and_others_are_refused(run_op, op):
    offer = products("int8_alone", "int8_channel")
    assert run_op((offer,), "int8_channel", op).outcome == "PASS"
    for name in ("q4_0", "fp8_block128", "q6_k"):
        evidence = run_op((offer,), name, op)
        assert evidence.outcome == "REFUSED"
        assert name in evidence.detail


def test_wrong_numbers_fail(run_op):
    evidence = run_op((products("without_scales", "int8_channel"),), "int8_channel")
    assert evidence.outcome == "FAIL"
    assert "argument 0" in evidence.detail


def test_a_format_that_is_read_but_not_offered_is_told(run_op):
    assert run_op((products("int8_alone"),), "int8_channel").outcome == "UNDERCLAIMED"


def test_references_refuse_and_are_not_forced(run_op):
    """They decode a weight of any format, as core does for everybody who does not read it."""
    assert run_op((), "int8_channel").outcome == "REFUSED"


def test_what_is_claimed_in_full_and_served_by_nobody_fails(run_op):
    evidence = run_op((), "int8_channel", claim=Full())
    assert evidence.outcome == "FAIL"
    assert f"{NAME} is claimed in full" in evidence.detail
    assert run_op((products("int8_alone", "int8_channel"),), "q4_0", claim=Full()).outcome == "FAIL"
    assert run_op((products("int8_alone", "int8_channel"),), "int8_channel", claim=Full()).outcome == "PASS"
    assert run_op((), "int8_channel", "gated_linear", claim=Full()).outcome == "REFUSED", "a fused op is left to its parts"


def test_every_format_has_cases_of_both_kinds_of_products_where_packed_weights_are_claimed():
    claims = {name: Full() for name in CAPABILITIES}
    for op in ("linear", "gated_linear", "rms_norm_gated_linear"):
        shapes = {run.shape for run in op_classes.runs_of(op, "float16", claims)}
        assert {f"mixed/h512/{name}" for name in FORMATS} <= shapes
        absent = {run.shape for run in op_classes.runs_of(op, "float16", {**claims, NAME: Unsupported("no kernel")})}
        assert {shape for shape in shapes - absent if shape.rpartition("/")[2] in FORMATS} == shapes - absent
        assert not {shape for shape in absent if shape.rpartition("/")[2] in FORMATS}
