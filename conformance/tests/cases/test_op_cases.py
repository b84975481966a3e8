"""L2: right ops pass in all layouts, and ops that are wrong in ways that real ones are fail, with a place or a reason."""

from __future__ import annotations

import sys

import pytest

from vllm_conformance.cases import op_classes
from vllm_conformance.cases import ops as planning
from vllm_core.api import CAPABILITIES, OPS, Full, Offer, Rejected, Unsupported
from vllm_core.api.ops import WHOLES
from vllm_core.registry.candidates import reference_offers


@pytest.fixture
def run_op(subject, run_case, monkeypatch, request):
    """Run one case of an op of `wrong_ops`, or of core's references where there is none."""
    monkeypatch.syspath_prepend(str(request.path.parent))

    def go(op, shape, *, dtype="float32", layout="", seed=0, entry=None, ops=None, **conditions):
        own = ()
        if entry is not None:
            family = {name: OPS[name].reference for name in ops or ()}
            own = (Offer(provider="wrong", ops={**family, op: f"wrong_ops:{entry}"}, **conditions),)
        return run_case(subject(own=own), "ops:run_op", op=op, dtype=dtype, shape=shape, seed=seed, layout=layout)

    yield go
    sys.modules.pop("wrong_ops", None)


KV = ("kv_bind", "kv_write", "paged_attention", "kv_copy", "kv_export", "kv_import")


def kv_conditions():
    from vllm_core.ops.layouts import kv_layout

    return {"ops": KV, "kv_layout": kv_layout, "features": frozenset({"sliding_window", "soft_cap", "sinks"})}


@pytest.mark.parametrize("layout", ["", "strided", "in_place", "graph"])
def test_the_reference_passes_in_every_layout(run_op, layout):
    evidence = run_op("rms_norm", "mixed", layout=layout, dtype="bfloat16")
    assert (evidence.outcome, evidence.calls) == ("PASS", {"reference": 1})
    assert len(evidence.digest) == 64


def test_the_plugins_own_op_is_judged_and_not_the_reference(run_op):
    evidence = run_op("add", "mixed", entry="add", kind="vendor")
    assert (evidence.outcome, evidence.calls) == ("PASS", {"vendor": 1})


@pytest.mark.parametrize("layout", ["", "graph"])
@pytest.mark.parametrize(("shape", "seed"), [("one_token/plain", 0), ("single/plain", 1), ("singles/plain", 0)])
def test_all_layers_at_once_are_judged_with_weights_and_blocks_of_others(run_op, shape, seed, layout):
    evidence = run_op("decode_layers", shape, entry="does_all_layers", seed=seed, layout=layout, dtype="bfloat16")
    assert (evidence.outcome, evidence.calls) == ("PASS", {"kernel": 1})


WRONG = (
    ("rms_norm", "mixed", "", "rounds_the_mean", "argument 0"),
    ("rms_norm", "mixed", "strided", "ignores_strides", "argument 0"),
    ("rms_norm", "mixed", "in_place", "clears_first", "argument 0"),
    ("rms_norm", "mixed", "", "adds_to_what_was_there", "nan"),
    ("gather_rows", "mixed", "", "spoils_an_input", "argument 2"),
    ("layer_norm", "mixed", "", "writes_nothing", "nan"),
    ("add", "mixed", "", "writes_a_row_too_many", "beside the arguments"),
    ("add", "mixed", "graph", "keeps_the_first_input", "argument 0"),
    ("rotary_embedding", "mixed/partial", "", "rotates_everything", "argument"),
    ("decode_layers", "single/plain", "", "leaves_it", "result: False"),
    ("decode_layers", "single/plain", "", "forgets_the_last_layer", "argument 0"),
    ("decode_layers", "singles/plain", "", "writes_no_keys", "argument 1[0]"),
    ("decode_layers", "single/plain", "graph", "starts_from_the_first_residual", "argument 0"),
    ("linear", "mixed/h127", "", "drops_the_rest_of_a_tile", "argument 0"),
    ("sample", "ties", "", "takes_the_last_of_equal_ones", "argument 0"),
    ("sample", "mixed", "", "has_its_own_random_numbers", "argument 0"),
    ("logit_adjust", "mixed", "", "writes_nothing", "argument 0"),
    ("grammar_mask", "mixed/v33", "", "forgets_the_last_word", "argument 0"),
    ("advance", "decode", "", "forgets_the_token", "argument 0.tokens"),
    ("build_step", "mixed", "", "maps_every_token_to_block_1", "result.slot_mapping"),
    ("batch_update", "mixed", "", "leaves_the_old_blocks", "argument 0.block_tables"),
)


@pytest.mark.parametrize(("op", "shape", "layout", "entry", "says"), WRONG, ids=[f"{row[0]}-{row[3]}" for row in WRONG])
def test_a_wrong_op_fails(run_op, op, shape, layout, entry, says):
    family = ("linear_pack",) if op == "linear" else ()
    found = [run_op(op, shape, layout=layout, seed=seed, entry=entry, ops=family, features=OPS[op].features) for seed in (0, 1)]
    bad = [evidence for evidence in found if evidence.outcome == "FAIL"]
    assert bad
    assert says in bad[0].detail
    assert bad[0].detail.startswith("wrong: ")


ATTENTION = (
    ("mixed/window", "without_window"),
    ("mixed/cap", "without_cap"),
    ("mixed/sinks", "without_sinks"),
    ("decode/sinks", "with_sinks_that_count_twice"),
    ("decode/q8/k2/plain", "with_heads_in_turn"),
    ("block_edges/plain", "without_the_last_of_a_block"),
    ("decode/rest", "with_weights_of_zero"),
    ("thousands/plain", "of_at_most_1024"),
)


@pytest.mark.parametrize(("shape", "entry"), ATTENTION, ids=[row[1] for row in ATTENTION])
def test_wrong_attention_fails_at_the_edge_made_for_it(run_op, shape, entry):
    assert run_op("paged_attention", shape, entry=f"attention_{entry}", **kv_conditions()).outcome == "FAIL"


def test_attention_without_a_window_passes_where_none_is_asked_for(run_op):
    evidence = run_op("paged_attention", "mixed/plain", entry="attention_without_window", **kv_conditions())
    assert evidence.outcome == "PASS"


def test_an_op_that_raises_fails_with_what_it_raised(run_op):
    evidence = run_op("activation", "mixed", entry="raises")
    assert (evidence.outcome, evidence.detail) == ("FAIL", "kernel table has no entry")


def test_a_refusal_is_good_where_a_direct_call_refuses_too(run_op):
    evidence = run_op("rotary_embedding", "mixed/interleaved", entry="rotary_that_refuses_pairs")
    assert evidence.outcome == "REFUSED"
    assert "interleaved" in evidence.detail


def test_a_refusal_of_what_works_is_underclaimed(run_op):
    evidence = run_op("rotary_embedding", "mixed/interleaved", entry="rotary_that_can_do_all")
    assert evidence.outcome == "UNDERCLAIMED"
    assert "gave right results" in evidence.detail


@pytest.mark.parametrize(("entry", "says"), [("raises", "RuntimeError instead of"), ("rotates_everything", "wrong results")])
def test_a_refusal_that_breaks_in_another_way_is_bad(run_op, entry, says):
    evidence = run_op("rotary_embedding", "mixed/interleaved/partial", entry=entry)
    assert evidence.outcome == "BAD_REFUSAL"
    assert says in evidence.detail


def test_a_device_that_is_broken_after_a_refusal_is_bad(host_device, subject, run_case, monkeypatch, request):
    monkeypatch.syspath_prepend(str(request.path.parent))

    class Loses(host_device):
        def allocate(self, pool, shape, dtype):
            tensor = super().allocate(pool, shape, dtype)
            return tensor.expand(2, *shape)[0].clone() if shape != (64,) else tensor[:1].expand(64)

    offer = Offer(provider="p", ops={"rotary_embedding": "wrong_ops:rotary_that_refuses_pairs"})
    case = {"op": "rotary_embedding", "dtype": "float32", "shape": "mixed/interleaved", "seed": 0, "layout": ""}
    evidence = run_case(subject(device=Loses(), own=(offer,)), "ops:run_op", **case)
    assert evidence.outcome == "BAD_REFUSAL"
    assert "afterwards" in evidence.detail


def test_every_own_offer_is_run_and_the_wrong_one_named(subject, run_case, monkeypatch, request):
    monkeypatch.syspath_prepend(str(request.path.parent))
    offers = (
        Offer(provider="good", ops={"layer_norm": OPS["layer_norm"].reference}),
        Offer(provider="bad", ops={"layer_norm": "wrong_ops:writes_nothing"}),
    )
    case = {"op": "layer_norm", "dtype": "float32", "shape": "mixed", "seed": 0, "layout": ""}
    evidence = run_case(subject(own=offers), "ops:run_op", **case)
    assert (evidence.outcome, evidence.calls) == ("FAIL", {"kernel": 2})
    assert evidence.detail.startswith("bad: ")


def test_accepts_is_asked_before_an_offer_is_run(subject, run_case):
    offer = Offer(provider="p", ops={"add": OPS["add"].reference}, accepts=lambda site: Rejected("size", "any", "none"))
    case = {"op": "add", "dtype": "float32", "shape": "mixed", "seed": 0, "layout": ""}
    assert run_case(subject(own=(offer,)), "ops:run_op", **case).outcome == "UNDERCLAIMED"


# -- planning


def collected(offers=None, **changes):
    claims = {**dict.fromkeys(CAPABILITIES, Full()), **changes}
    wholes = Offer(provider="p", ops={name: OPS[name].reference for name in WHOLES})
    return list(planning.collect(claims, (*reference_offers(), wholes) if offers is None else offers, None))


def test_every_op_has_cases_in_every_dtype_that_it_depends_on():
    ids = {case.id for case in collected()}
    for op in set(OPS) - planning.PRIVATE:
        for dtype in ["any"] if op in op_classes.ANY_DTYPE else planning.DTYPES:
            assert any(one.startswith(f"L2/{op}/{dtype}/") for one in ids), (op, dtype)


def test_an_op_that_nobody_serves_has_no_cases():
    cases = collected([Offer(provider="p", ops={"add": "m:f"})])
    assert {case.group for case in cases} == {"op:add"}


def test_the_edges_of_attention_are_there():
    shapes = {case.params["shape"] for case in collected() if case.group == "op:paged_attention"}
    for size in (64, 80, 96, 128, 256):
        assert f"mixed/d{size}/plain" in shapes
    for size in (1, 8, 32, 64, 128, 256):
        assert f"block_edges/b{size}/q2/k1/plain" in shapes
    assert {"one_token/plain", "one_sequence/plain", "empty/plain", "thousands/plain", "decode/rest"} <= shapes
    assert {
        "decode/q4/k4/plain",
        "decode/q8/k4/plain",
        "decode/q8/k2/plain",
        "decode/q8/k1/plain",
        "decode/q16/k2/plain",
    } <= shapes


@pytest.mark.parametrize(
    ("claim", "part"),
    [
        ("attention.sliding_window", "window"),
        ("attention.soft_cap", "cap"),
        ("attention.sinks", "sinks"),
        ("attention.encoder", "encoder_attention"),
        ("kv_dtype.fp8", "kv_fp8"),
        ("kv_dtype.int8", "kv_int8"),
        ("dtype.float16", "float16"),
        ("graphs", "graph"),
    ],
)
def test_what_is_not_claimed_is_not_asked_of_ops(claim, part):
    before, after = {case.id for case in collected()}, {case.id for case in collected(**{claim: Unsupported("no")})}
    assert after < before
    assert all(part in one for one in before - after)
    assert not any(part in one.split("/") for one in after) or claim == "dtype.float16"


def test_planning_loads_no_torch():
    import subprocess

    code = (
        "import sys\nfrom vllm_conformance.collect import case_modules\ncase_modules()\n"
        "assert 'torch' not in sys.modules, 'torch is loaded'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
