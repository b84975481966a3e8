"""Every op has what its specification names, and the checker catches what is wrong."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import torch

from vllm_core.api import OPS
from vllm_core.api.ops import get
from vllm_core.errors import UnsupportedError
from vllm_core.ops import check, inputs, shapes


@pytest.mark.parametrize("op", OPS)
def test_reference_takes_the_arguments_of_the_schema(op: str) -> None:
    schema = OPS[op].schema.partition(" -> ")[0].strip("()")
    depth, names, defaults, word = 0, [], {}, ""
    for char in schema + ",":
        depth += (char == "[") - (char == "]")
        if char == "," and not depth:
            given, has_default, default = word.partition(" = ")
            names.append(given.split()[-1].rstrip("!~"))
            defaults |= {names[-1]: default} if has_default else {}
            word = ""
        else:
            word += char
    parameters = inspect.signature(OPS[op].load_reference()).parameters
    assert list(parameters) == names
    found = {name: str(one.default) for name, one in parameters.items() if one.default is not inspect.Parameter.empty}
    assert found == defaults
    assert names[len(names) - len(defaults) :] == list(defaults), "arguments with a default come last"


@pytest.mark.parametrize("op", OPS)
def test_generated_inputs_run_through_the_reference_in_every_shape_class(op: str) -> None:
    generator = OPS[op].load_generator()
    assert inputs.SHAPE_CLASSES[op]
    for shape_class in inputs.SHAPE_CLASSES[op]:
        arguments = generator("bfloat16", 1, shape_class)
        again = generator("bfloat16", 1, shape_class)
        parameters = inspect.signature(OPS[op].load_reference()).parameters.values()
        assert len(arguments) == sum(one.default is inspect.Parameter.empty for one in parameters)
        if shape_class != "long":
            assert check.mismatches(op, check.reference(), "bfloat16", 1, shape_class) == []
        for one, other in zip(arguments, again, strict=True):
            if isinstance(one, torch.Tensor):
                assert torch.equal(torch.nan_to_num(one.float()), torch.nan_to_num(other.float()))


def test_generators_reach_the_head_sizes_of_known_models() -> None:
    reached = {inputs.shape_of(name).head_size for name in shapes.KV_CLASSES}
    assert reached >= {64, 80, 96, 128, 256}


def _wrong_norm(out, x, weight, eps) -> None:
    wide = x.float()
    out.copy_(wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight * 1.001)


def test_checker_rejects_a_kernel_that_is_slightly_wrong() -> None:
    provider = check.Provider({**check.reference().ops, "rms_norm": _wrong_norm}, None)
    assert check.mismatches("rms_norm", provider, "float32", 0, "mixed")


def test_checker_rejects_a_kernel_that_writes_where_it_must_not() -> None:
    def spoils(out, x, rows) -> None:
        torch.index_select(x, 0, rows, out=out)
        x.zero_()

    provider = check.Provider({**check.reference().ops, "gather_rows": spoils}, None)
    problems = check.mismatches("gather_rows", provider, "float32", 0, "mixed")
    assert problems
    assert problems[0].startswith("argument 1")


def test_checker_rejects_attention_without_its_window() -> None:
    oracle = check.reference()

    def forgets(*arguments) -> None:
        oracle.ops["paged_attention"](*arguments[:9], 0, arguments[10])

    provider = check.Provider({**oracle.ops, "paged_attention": forgets}, oracle.kv_layout)
    assert check.mismatches("paged_attention", provider, "float32", 1, "mixed")
    assert not check.mismatches("paged_attention", provider, "float32", 0, "mixed")


def test_unknown_op_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(UnsupportedError, match="rms_norm"):
        get("rms_nrom")


def test_layouts_are_planned_without_torch() -> None:
    code = "import sys; import vllm_core.ops.layouts; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_kv_dtype_is_refused_with_the_known_ones() -> None:
    from vllm_core.api import KVGroupSpec
    from vllm_core.ops.layouts import kv_layout

    group = KVGroupSpec(index=0, kind="full", layers=(0,), num_kv_heads=2, head_size=8)
    assert kv_layout(group, "bfloat16", 16).block_bytes == 2 * 16 * 2 * 8 * 2
    with pytest.raises(UnsupportedError, match="float32"):
        kv_layout(group, "int4", 16)
