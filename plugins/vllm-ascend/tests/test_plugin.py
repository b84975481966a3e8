"""The entry point, the claims, and what must not be in the sources."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import vllm_ascend
from vllm_ascend import plugin
from vllm_ascend.backends import offers as backend
from vllm_core.api import CAPABILITIES, OPS, Accepted, CallSite, DeviceFacts, KVGroupSpec, Rejected, UnsupportedError

SOURCES = sorted(Path(vllm_ascend.__file__).parent.rglob("*.py"))
NPU = DeviceFacts(
    id="0", name="Ascend 910B3", device_type="npu", architecture="910b", memory_kind="discrete", memory_bytes=1 << 30
)
GROUP = KVGroupSpec(index=0, kind="full", layers=(0,), num_kv_heads=2, head_size=64)


def test_the_platform_is_found_by_name():
    (found,) = [one for one in entry_points(group="vllm.platforms") if one.name == "ascend"]
    assert found.load() is plugin


def test_the_manifest_answers_for_every_capability_and_says_that_nothing_ran_on_hardware():
    manifest = plugin.manifest()
    assert set(manifest.claims) == set(CAPABILITIES)
    assert manifest.support_level == "experimental"
    assert "not run on hardware" in manifest.note
    assert manifest.conformance_level == 0


def test_loading_the_plugin_imports_neither_torch_nor_the_vendors_package():
    code = "import sys, vllm_ascend.plugin as p; p.manifest(); print([m for m in ('torch', 'torch_npu') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_only_code_that_runs_on_the_device_imports_the_vendors_package():
    importing = {path.name for path in SOURCES if "import torch_npu" in path.read_text(encoding="utf-8")}
    ops = {"norm.py", "activation.py", "rope.py", "linear.py", "attention.py", "experts.py"}
    assert importing == {"device.py", "graphs.py"} | ops


def test_every_offer_names_known_ops_and_callables_of_this_package():
    for offer in plugin.offers(NPU):
        assert offer.kind == "vendor"
        for op, entry in offer.ops.items():
            module, _, name = entry.partition(":")
            assert op in OPS
            assert f"def {name}(" in (Path(vllm_ascend.__file__).parent / "ops" / f"{module.rpartition('.')[2]}.py").read_text()


@pytest.mark.parametrize(
    ("changes", "need"),
    [
        ({"tokens_per_block": 64}, "block size"),
        ({"head_size": 80}, "head size"),
        ({"dtype": "float32", "kv_dtype": "float32"}, "kv dtype"),
        ({"kv_dtype": "bfloat16"}, "kv dtype"),
        ({"features": frozenset({"sliding_window"})}, "feature"),
        ({"features": frozenset({"soft_cap"})}, "feature"),
    ],
)
def test_attention_is_offered_within_the_vendors_rules_alone(changes, need):
    fields = {"dtype": "float16", "kv_dtype": "float16", "head_size": 64, "tokens_per_block": 128, **changes}
    (offer,) = [one for one in plugin.offers(NPU) if "paged_attention" in one.ops]
    verdict = offer.judge(CallSite(op="paged_attention", role="attention.full", **fields), "910b")
    assert isinstance(verdict, Rejected)
    assert verdict.need == need


def test_blocks_hold_keys_and_values_and_other_dtypes_are_refused():
    assert backend.kv_layout(GROUP, "float16", 128).block_bytes == 2 * 2 * 128 * 64 * 2
    with pytest.raises(UnsupportedError, match="KV dtype has no layout"):
        backend.kv_layout(GROUP, "int8", 128)


def test_nothing_is_offered_for_other_hardware():
    gpu = DeviceFacts(id="0", name="GPU", device_type="cuda", architecture="sm_90", memory_kind="discrete", memory_bytes=1)
    assert not plugin.offers(gpu)


def test_steps_are_larger_and_captured_unless_the_user_set_them():
    changed = plugin.configure({"max_num_batched_tokens": 2048}, frozenset())
    assert changed.changes["max_num_batched_tokens"] == 8192
    assert set(changed.reasons) == set(changed.changes) == {"max_num_batched_tokens", "graph_sizes"}
    assert not plugin.configure({}, frozenset({"max_num_batched_tokens", "graph_sizes"})).changes


def test_int8_weights_are_read_in_half_precision_alone():
    (offer,) = [one for one in plugin.offers(NPU) if "linear" in one.ops and "int8_channel" in one.formats]
    site = CallSite(op="linear", role="mlp.up", dtype="float16", format="int8_channel")
    assert isinstance(offer.judge(site, "910b"), Accepted)
    verdict = offer.judge(replace(site, dtype="float32"), "910b")
    assert isinstance(verdict, Rejected)
    assert verdict.need == "dtype"
