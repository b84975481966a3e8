"""Step programs that platforms bring: when one is taken instead of core's own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vllm_core.api import KVLayout, ProgramOffer
from vllm_core.errors import PlanError
from vllm_core.registry.explain import from_json, to_json
from vllm_core.registry.select import plan
from vllm_core.registry.validate import check_programs


def layout(group, dtype, size):
    if size > 32:
        raise ValueError("too large")
    return KVLayout(layout_id="own", dtype=dtype, tokens_per_block=size, block_bytes=64 * size)


def program(**changes):
    values = {
        "name": "fast",
        "entry": "own:make",
        "kind": "program",
        "architectures": frozenset({"LlamaForCausalLM"}),
        "devices": frozenset(),
        "kv_layout": layout,
    }
    return ProgramOffer(**{**values, **changes})


@pytest.fixture
def bringing(candidate):
    """A candidate that brings these programs; without references where `eager` is false."""

    def make(*programs, eager=True):
        made = candidate()
        return replace(made, programs=programs, eager_full=eager, offers=made.offers if eager else ())

    return make


def test_a_program_that_is_not_proven_faster_stays_behind_cores_own(needs, bringing):
    made = plan(needs(), [bringing(program())], [])
    assert (made.program, made.program_entry) == ("core", "")
    assert made.bindings


def test_a_program_proven_faster_goes_first_and_the_plan_reads_back(needs, bringing):
    slow, proven = program(), program(name="proven", proven_faster="report-7")
    made = plan(needs(windows=(None, 128)), [bringing(slow, proven)], [])
    assert (made.program, made.program_entry, made.bindings, made.graphs) == ("proven", "own:make", (), False)
    assert made.reasons["program"] == "proven: proven faster: report-7"
    assert [group.layout.layout_id for group in made.kv_groups] == ["own", "own"]
    assert from_json(to_json(made)) == made


def test_a_program_is_taken_where_cores_own_cannot_run(needs, bringing):
    made = plan(needs(), [bringing(program(), eager=False)], [])
    assert made.program == "fast"
    assert "core's own cannot run here" in made.reasons["program"]


def test_a_flat_model_is_a_track_of_its_own(needs, bringing):
    assert plan(needs(), [bringing(program(kind="flat", proven_faster="r"))], []).track == "flat"


def test_a_program_asked_for_by_name_happens(needs, bringing):
    assert plan(needs(program="fast"), [bringing(program(name="other"), program())], []).program == "fast"
    proven = program(proven_faster="report-7")
    assert plan(needs(program="core"), [bringing(proven)], []).program == "core"


def test_a_program_that_nobody_brings_has_a_nearest_name(needs, bringing):
    with pytest.raises(PlanError, match="did you mean 'fast'"):
        plan(needs(program="fats"), [bringing(program())], [])


def test_a_program_of_another_platform_rejects_this_one(needs, bringing, candidate):
    with pytest.raises(PlanError, match="program fast: it brings none"):
        plan(needs(program="fast", platform="lone"), [bringing(program()), candidate("lone")], [])


@pytest.mark.parametrize(
    ("changes", "wanted", "reason"),
    [
        ({"architectures": frozenset({"BertModel"})}, {}, "model: wanted LlamaForCausalLM, supported BertModel"),
        ({"devices": frozenset({"other1"})}, {}, "device: wanted fake1, supported other1"),
        ({"dtypes": frozenset({"int4"})}, {}, "dtype: wanted float32, supported int4"),
        ({"kv_dtypes": frozenset({"int4"})}, {}, "KV dtype: wanted float32, supported int4"),
        ({"block_sizes": (16, 32)}, {"block_size": 8}, "block size: wanted 8, supported 16, 32"),
        ({"kv_layout": None}, {}, "block size 16: it gives no KV layout"),
        ({"block_sizes": (64,)}, {}, "block size 64: kv_layout raised ValueError: too large"),
        ({"block_sizes": ()}, {}, "it names no block size"),
        ({}, {"providers": {"rms_norm": "reference"}}, "providers were forced"),
    ],
)
def test_what_the_program_lacks_is_said(needs, bringing, changes, wanted, reason):
    with pytest.raises(PlanError) as caught:
        plan(needs(program="fast", **wanted), [bringing(program(**changes))], [])
    assert f"program fast: {reason}" in caught.value.found


def test_the_block_size_is_the_users_else_the_first_that_has_a_layout(needs, bringing):
    sizes = [
        plan(needs(program="fast", **asked), [bringing(program(block_sizes=(64, 32, 16)))], [])
        .kv_groups[0]
        .layout.tokens_per_block
        for asked in ({}, {"block_size": 16})
    ]
    assert sizes == [32, 16]


@pytest.mark.parametrize(
    ("programs", "cause"),
    [
        (["x"], "returned str"),
        ([program(name="core")], "'core'"),
        ([program(), program()], "'fast'"),
        ([program(name="")], "''"),
    ],
)
def test_programs_need_names_of_their_own(programs, cause):
    assert cause in check_programs(programs).cause
    assert check_programs([program(), program(name="other")]) is None
