"""Arguments on a device: poisoned, guarded, strided, on each other's memory; and what the judge sees of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from vllm_core.api import OPS
from vllm_core.ops import check, norm
from vllm_core.ops.check import Where, judge
from vllm_core.ops.inputs import SHAPE_CLASSES
from vllm_core.ops.place import GUARD, OUTPUTS, Placement, arguments_of, needed_of, poison

PLAIN = Where()


def judged(op: str, function: Callable[..., object], where: Where = PLAIN, shape: str = "mixed") -> list[str]:
    provider = check.Provider({**check.reference().ops, op: function}, check.reference().kv_layout)
    return judge(op, provider, "float32", 1, shape, where).problems


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.int64, torch.uint8, torch.bool])
def test_poison_is_no_result(dtype):
    poisoned = poison(torch.zeros(5, dtype=dtype))
    assert poisoned.float().isnan().all() if dtype.is_floating_point else poisoned.all()


def test_outputs_hold_poison_and_inputs_their_values():
    out, x, weight = torch.zeros(3, 4), torch.randn(3, 4), torch.randn(4)
    placed = Placement().arguments(OPS["rms_norm"], (out, x, weight, 1e-6), lambda value, copy: value)
    assert placed[0].isnan().all()
    assert torch.equal(placed[1], x)
    assert placed[3] == 1e-6


def test_views_are_contiguous_unless_they_are_to_be_strided():
    x = torch.randn(3, 4, 8)
    for strided in (False, True):
        placement = Placement(strided=strided)
        (q, _, positions, _, _) = placement.arguments(
            OPS["rotary_embedding"], (x, x.clone(), torch.arange(3).int(), torch.randn(9, 2, 4), False), lambda v, copy: v
        )
        assert q.is_contiguous() is not strided
        assert q.stride(-1) == 1
        assert positions.is_contiguous()
        assert torch.equal(q, x)
        assert q.storage_offset() * q.element_size() % 64 == 0


def test_one_tensor_given_twice_is_placed_once_and_not_poisoned():
    x = torch.randn(3, 4)
    out, again, _, _ = Placement().arguments(OPS["rms_norm"], (x, x, torch.ones(4), 1e-6), lambda value, copy: value)
    assert out is again
    assert torch.equal(out, x)


def test_a_store_beside_an_argument_is_counted():
    placement, x = Placement(), torch.randn(3, 4)
    placed = placement.tensor(x)
    assert placement.spilled() == 0
    torch.as_strided(placed.view, (2,), (1,), 12).zero_()
    assert placement.spilled() > 0
    assert torch.equal(placed.fetch(), x)
    assert len(placed.base) == 12 + GUARD


def test_a_store_between_rows_is_counted():
    placement = Placement(strided=True)
    placed = placement.tensor(torch.randn(3, 4), strided=True)
    assert placement.spilled() == 0
    placed.base[1, GUARD + 4] = 1.0
    assert placement.spilled() > 0


@pytest.mark.parametrize("op", OPS)
def test_every_output_that_is_named_so_is_known(op):
    names = needed_of(OPS[op])
    assert len(names) == len(OPS[op].load_generator()("float32", 0, SHAPE_CLASSES[op][0]))
    assert {name for name in names if name == "out!"} <= OUTPUTS


def test_arguments_with_a_default_are_named_last_and_not_needed():
    names = arguments_of(OPS["paged_attention"])
    assert names == [*needed_of(OPS["paged_attention"]), "sinks"]


@pytest.mark.parametrize("where", [Where(strided=True), Where(in_place=True)])
def test_the_reference_holds_in_every_layout(where):
    assert judged("rms_norm", norm.rms_norm, where) == []


def test_an_op_that_takes_zeros_for_granted_is_seen():
    def accumulates(out, a, b):
        out.add_(a).add_(b)

    assert any("nan" in line for line in judged("add", accumulates))


def test_an_op_that_reads_its_input_after_it_has_written_is_seen_in_place_alone():
    def twice(out, x, weight, eps):
        norm.rms_norm(out, x, weight, eps)
        norm.rms_norm(out, x, weight, eps)

    assert judged("rms_norm", twice) == []
    assert judged("rms_norm", twice, Where(in_place=True))


def test_the_digest_is_that_of_the_results():
    right = judge("add", check.reference(), "float32", 0, "mixed")
    again = judge("add", check.reference(), "float32", 0, "mixed")
    other = judge("add", check.reference(), "float32", 1, "mixed")
    assert right.digest == again.digest != other.digest


def test_the_padding_row_of_a_state_holds_anything_but_computed_stays_0():
    advance = check.reference().ops["advance"]

    def scribbles(state, inputs, tokens):
        advance(state, inputs, tokens)
        state.tokens[state.num_slots] = 77

    def counts(state, inputs, tokens):
        advance(state, inputs, tokens)
        state.computed[state.num_slots] = 1

    assert judged("advance", scribbles) == []
    assert any("computed" in line for line in judged("advance", counts))


def test_what_a_fused_reduction_leaves_in_its_input_is_not_read():
    fused = check.reference().ops["all_reduce_add_rms_norm"]

    def spoils(out, residual, x, weight, eps, group):
        fused(out, residual, x, weight, eps, group)
        x.zero_()

    assert judged("all_reduce_add_rms_norm", spoils) == []


def narrow_cache(round_to: torch.dtype | None) -> check.Provider:
    """A cache that keeps float32, rounded to what an fp8 cache could hold; or not rounded."""
    oracle = check.reference()

    def rounded(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if round_to is None else tensor.to(round_to).float()

    def bind(memory, heads, size, dtype, tokens):
        return oracle.ops["kv_bind"](memory, heads, size, "float32", tokens)

    def write(kv, k, v, mapping):
        oracle.ops["kv_write"](kv, rounded(k), rounded(v), mapping)

    def read_in(kv, blocks, target):
        oracle.ops["kv_import"](kv, rounded(blocks), target)

    def layout(group, dtype, tokens):
        return check.kv_layout(group, "float32", tokens)

    return check.Provider({**oracle.ops, "kv_bind": bind, "kv_write": write, "kv_import": read_in}, layout)


@pytest.mark.parametrize("op", ["kv_write", "kv_import", "kv_export", "kv_copy", "paged_attention"])
def test_a_cache_in_fp8_is_judged_by_the_values_that_fp8_has(op):
    found = judge(op, narrow_cache(torch.float8_e4m3fn), "float32", 0, "mixed/kv_fp8")
    assert found.problems == []


@pytest.mark.parametrize("op", ["kv_write", "kv_import"])
def test_a_cache_that_rounds_to_another_dtype_fails(op):
    assert judge(op, narrow_cache(torch.float8_e5m2), "float32", 0, "mixed/kv_fp8").problems
    assert judge(op, narrow_cache(None), "float32", 0, "mixed/kv_fp8").problems


@pytest.mark.parametrize("op", ["kv_write", "kv_export", "paged_attention"])
def test_a_cache_in_int8_is_judged_within_its_steps(op):
    assert judge(op, narrow_cache(None), "float32", 0, "mixed/kv_int8").problems == []
    assert judge("kv_write", narrow_cache(torch.float8_e5m2), "float32", 0, "mixed/kv_int8").problems
