"""Write what the accelerator packages of this repository plan for small models, architecture by architecture.

    python tools/record_plans.py

An upgrade that leaves an architecture without a provider, or moves an op to a reference, is then a difference in
`tests/recorded_plans.json` that a reviewer sees, and not a surprise on a machine. Nothing is run; no hardware is needed.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from vllm_core.api import DeviceFacts, ProbeReport
from vllm_core.config import EngineConfig
from vllm_core.launch import needs_of
from vllm_core.loader.source import open_model
from vllm_core.registry.candidates import Plugins, load_all, with_offers
from vllm_core.registry.discover import find
from vllm_core.registry.load import Loaded
from vllm_core.registry.plan import Needs, Plan
from vllm_core.registry.select import plan

PATH = Path(__file__).resolve().parent.parent / "tests" / "recorded_plans.json"
PLATFORMS = ("ascend", "cuda", "rocm", "xpu")
SIZES = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**SIZES, "architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "gemma3": {
        **SIZES,
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "sliding_window": 512,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "qwen3_moe": {
        **SIZES,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
}


def recorded() -> dict[str, dict[str, Any]]:
    """For each platform, architecture and model: who serves, what is left to references, and how KV is kept."""
    plugins = load_all([one for one in find() if one.platform in PLATFORMS])
    asked = {name: _needs(config) for name, config in MODELS.items()}
    return {
        f"{loaded.found.platform} {architecture} {model}": _row(_plan(loaded, architecture, plugins, needs))
        for loaded in sorted(plugins.platforms, key=lambda one: one.found.platform)
        for architecture in (loaded.manifest.architectures if loaded.manifest is not None else ())
        for model, needs in asked.items()
    }


def _needs(config: dict[str, Any]) -> Needs:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
        options = EngineConfig.from_options({"model": folder, "load_format": "dummy", "skip_tokenizer_init": True})
        return needs_of(options, open_model(options.model))


def _plan(loaded: Loaded, architecture: str, plugins: Plugins, needs: Needs) -> Plan:
    """Raises PlanError where the architecture cannot run the model."""
    assert loaded.manifest is not None, "a platform has a manifest"
    device = DeviceFacts(
        id="0",
        name=architecture,
        device_type=loaded.manifest.device_type,
        architecture=architecture,
        memory_kind="discrete",
        memory_bytes=64 << 30,
        driver_version="9999.0",
        runtime_version="99.0",
    )
    return plan(needs, with_offers(loaded, ProbeReport(devices=(device,), checks=()), plugins), [])


def _row(chosen: Plan) -> dict[str, Any]:
    return {
        "providers": sorted({one.provider for one in chosen.bindings if one.kind != "reference"}),
        "references": sorted({one.op for one in chosen.bindings if one.kind == "reference"}),
        "kv": [f"{one.layout.layout_id}, {one.layout.dtype}, {one.layout.tokens_per_block} tokens" for one in chosen.kv_groups],
        "graphs": chosen.graphs,
    }


def to_text(rows: dict[str, dict[str, Any]]) -> str:
    """One line a plan, so that a difference is one line too."""
    return "{\n" + ",\n".join(f" {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items()) + "\n}\n"


def main() -> None:
    """Write the file and name it."""
    PATH.write_text(to_text(recorded()), "utf-8")
    print(PATH)


if __name__ == "__main__":
    main()
