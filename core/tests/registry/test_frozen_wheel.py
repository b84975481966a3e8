"""A wheel built against the oldest API version that this core loads, kept as it was: it still loads, plans and generates.

It is what `plugin new` wrote at API 0.1, with one op of its own. A core that drops API 0 drops this file for a newer one.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from vllm_core.authoring.check import check

WHEEL = Path(__file__).parent / "assets" / "vllm_frozen-0.1.0-py3-none-any.whl"
SIZES = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}
EXPLAIN = """
import json
from vllm_core.launch import blueprint
from vllm_core.registry.explain import to_json
print(json.dumps(json.loads(to_json(blueprint({"model": MODEL, "platform": "frozen"}).plan))))
"""
GENERATE = """
import json
from vllm_core import LLM, SamplingParams
llm = LLM(MODEL, platform="frozen", load_format="dummy", skip_tokenizer_init=True, max_num_seqs=2)
outputs = llm.generate([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True), use_tqdm=False)
print(json.dumps([output.outputs[0].token_ids for output in outputs]))
"""


@pytest.fixture
def frozen(site, tmp_path):
    """Run code where the wheel is installed; ``MODEL`` is a folder that has a config alone."""
    with zipfile.ZipFile(WHEEL) as archive:
        archive.extractall(site.folder)
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SIZES))
    return lambda code: site.child(f"MODEL = {str(folder)!r}\n{code}", VLLM_CORE_PLUGINS="frozen")


def test_it_passes_level_0(site):
    (result,) = check(str(WHEEL), site.environ)
    assert [str(one) for one in result.findings if one.outcome == "failed"] == []


def test_it_plans_with_its_own_op(frozen):
    plan = frozen(EXPLAIN)
    assert (plan["platform"], plan["distribution_version"]) == ("frozen", "0.1.0")
    providers = {one["op"]: one["provider"] for one in plan["bindings"]}
    assert providers["rms_norm"] == "vllm-frozen"
    assert {provider for op, provider in providers.items() if op != "rms_norm"} == {"reference"}


def test_it_generates(frozen):
    pytest.importorskip("torch")
    tokens = frozen(GENERATE)
    assert [len(row) for row in tokens] == [4, 4]
    assert all(0 <= token < SIZES["vocab_size"] for row in tokens for token in row)
