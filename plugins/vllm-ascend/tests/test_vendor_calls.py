"""Every form of call that this package makes, checked against the vendor's published wheel.

The schemas that the simulator registers are those of the wheel (its own test compares them), so that a call with a wrong name,
order or type fails in every test on the simulated device. Here the calls are repeated on the wheel's Meta kernels, which infer
shapes and dtypes of results and refuse some wrong ones. It takes the real wheel, on empty stand-ins for CANN's libraries.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent
REPLAY = """
import json, sys, torch, torch_npu
def make(value):
    if isinstance(value, dict) and "tensor" in value:
        shape, strides, dtype = value["tensor"]
        return torch.empty_strided(shape, strides, dtype=getattr(torch, dtype.partition(".")[2]), device="meta")
    if isinstance(value, dict) and "dtype" in value:
        return getattr(torch, value["dtype"].partition(".")[2])
    if isinstance(value, dict):
        return {key: make(one) for key, one in value.items()}
    return [make(one) for one in value] if isinstance(value, list) else value
def form(value):
    if isinstance(value, torch.Tensor):
        return [list(value.shape), str(value.dtype)]
    return [form(one) for one in value] if isinstance(value, (list, tuple)) else value
found = {}
for line in open("calls.json"):
    call = json.loads(line)
    space, _, name = call["op"].partition("::")
    known = found.setdefault(call["op"], {"calls": 0, "agree": 0, "said": []})
    known["calls"] += 1
    try:
        result = getattr(getattr(torch.ops, space), name)(*make(call["arguments"]), **make(call["options"]))
        same = form(result) == form(make(call["results"]))
        known["agree"] += same
        if not same:
            known["said"].append(f"{form(result)} and {form(make(call['results']))}")
    except Exception as error:
        known["said"].append(f"{type(error).__name__}: {str(error).splitlines()[0]}")
print(json.dumps(found))
"""
WITHOUT_META = {"atb::_npu_reshape_and_cache"}
"""Ops for which the wheel has no Meta kernel: their calls match the schema, and that is all that can be said."""


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_vendors_meta_kernels_accept_every_call_and_infer_the_same_results(simulated, child, tmp_path):
    from vllm_simulator.npu.extract import run_with_wheel

    wheel = os.environ.get("TORCH_NPU_WHEEL")
    if not wheel:
        pytest.skip("TORCH_NPU_WHEEL names no file: pip download --no-deps torch-npu==2.13.0")
    environ = {**simulated(), "SIMULATOR_CALLS": str(tmp_path / "calls.json")}
    child(HERE / "attention_child.py", "float16,bfloat16", "128", environ=environ)
    for dtype in ("float16", "bfloat16"):
        child(HERE / "calls_child.py", dtype, environ=environ)
    found = json.loads(run_with_wheel(Path(wheel), REPLAY, tmp_path).splitlines()[-1])
    print({op: (one["calls"], one["agree"]) for op, one in found.items()})
    assert len(found) >= 7
    for op, one in found.items():
        if op in WITHOUT_META:
            assert all("NotImplementedError" in text or "no kernel" in text.lower() for text in one["said"])
        else:
            assert one["agree"] == one["calls"], (op, one["said"][:3])
