"""Bad input at the command line: exit status 2, one error of four parts on stderr, no traceback."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_core.cli.main import main

SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "float32",
    "tie_word_embeddings": False,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small Llama with random weights and no tokenizer."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in SMALL.items() if k not in ("architectures", "torch_dtype")}))
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(SMALL), encoding="utf-8")
    return tmp_path


def fails(capfd: pytest.CaptureFixture[str], *arguments: str, mentions: tuple[str, ...]) -> str:
    """Run the command; check status and form, and that the message holds what a user needs."""
    try:
        status = main(["generate", *arguments])
    except SystemExit as stop:
        status = stop.code
    text = capfd.readouterr().err
    assert status == 2, text
    for part in ("found:", "expected:", "fix:", *mentions):
        assert part in text, f"{part!r} is not in:\n{text}"
    assert "Traceback" not in text
    return text


def change(folder: Path, **values: object) -> None:
    config = {**SMALL, **values}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}), encoding="utf-8")


def ids(folder: Path, *more: str) -> tuple[str, ...]:
    return ("--model", str(folder), "--prompt-token-ids", "1,2,3", "--max-tokens", "2", *more)


def test_a_good_model_generates(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", *ids(folder), "--json", "--kv-cache-memory-bytes", "10000000"]) == 0
    assert len(json.loads(capfd.readouterr().out)["token_ids"]) == 2


def test_a_path_that_is_not_there(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fails(capfd, *ids(tmp_path / "nothing"), mentions=("nothing",))


def test_an_empty_folder(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fails(capfd, *ids(tmp_path), mentions=("config.json",))


def test_a_config_that_is_no_json(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "config.json").write_text("{", encoding="utf-8")
    fails(capfd, *ids(folder), mentions=("config.json",))


def test_an_unknown_architecture(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    change(folder, architectures=["LamaForCausalLM"], model_type="lama")
    fails(capfd, *ids(folder), mentions=("lama", "llama"))


def test_missing_weights(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "model.safetensors").unlink()
    fails(capfd, *ids(folder), mentions=("safetensors",))


@pytest.mark.parametrize("keep", [0, 7, 100, 5000])
def test_truncated_weights(folder: Path, capfd: pytest.CaptureFixture[str], keep: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    fails(capfd, *ids(folder), mentions=("model.safetensors",))


def test_weights_of_another_shape(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    change(folder, intermediate_size=64)
    fails(capfd, *ids(folder), mentions=("mlp", "64", "48"))


def test_weights_without_a_tensor(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    change(folder, num_hidden_layers=3)
    fails(capfd, *ids(folder), mentions=("layers.2",))


@pytest.mark.model
def test_a_gguf_cut_in_half(model_file: Callable[[str], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = model_file("SmolLM2-135M-Instruct.Q4_1.gguf")
    half = tmp_path / "half.gguf"
    shutil.copyfile(source, half)
    with half.open("r+b") as file:
        file.truncate(source.stat().st_size // 2)
    fails(capfd, "--model", str(half), "--prompt", "x", mentions=("half.gguf", "bytes"))


@pytest.mark.parametrize(
    ("options", "mentions"),
    [
        (("--max-num-seq", "4"), ("--max-num-seqs",)),
        (("--max-num-seqs", "-4"), ("max_num_seqs", "-4")),
        (("--max-num-seqs", "four"), ("max_num_seqs", "four")),
        (("--platform", "cpx"), ("cpx", "cpu")),
        (("--dtype", "float8"), ("dtype", "float8")),
        (("--kv-cache-dtype", "int4"), ("--kv-cache-dtype", "int4", "int8")),
        (("--block-size", "0"), ("block_size",)),
        (("--provider", "linear=nobody"), ("nobody",)),
        (("--provider", "linaer=reference"), ("linaer", "linear")),
        (("--max-model-len", "100000"), ("100000", "256")),
        (("--max-model-len", "256", "--kv-cache-memory-bytes", "1000"), ("1000 bytes", "--kv-cache-memory-bytes")),
        (("--tensor-parallel-size", "65"), ("tensor_parallel_size", "65", "64")),
        (("--tensor-parallel-size", "7"), ("7", "attention heads", "--tensor-parallel-size 1")),
        (("--temperature", "-1"), ("temperature", "-1")),
        (("--temperature", "nan"), ("temperature", "nan")),
        (("--top-p", "1.5"), ("top_p", "1.5")),
    ],
    ids=lambda value: " ".join(value),
)
def test_a_wrong_option(
    folder: Path, capfd: pytest.CaptureFixture[str], options: tuple[str, ...], mentions: tuple[str, ...]
) -> None:
    fails(capfd, *ids(folder, *options), mentions=mentions)


@pytest.mark.parametrize(
    ("tokens", "mentions"),
    [("1,64", ("64",)), ("-1", ("-1",)), ("", ("empty",)), (",".join(["1"] * 256), ("256 tokens",))],
    ids=["outside", "negative", "empty", "too long"],
)
def test_a_wrong_prompt(folder: Path, capfd: pytest.CaptureFixture[str], tokens: str, mentions: tuple[str, ...]) -> None:
    fails(capfd, "--model", str(folder), f"--prompt-token-ids={tokens}", mentions=mentions)


def test_token_ids_that_are_none(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fails(capfd, "--model", str(folder), "--prompt-token-ids", "1,x", mentions=("x",))


def test_text_for_a_model_without_a_tokenizer(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fails(capfd, "--model", str(folder), "--prompt", "x", mentions=("tokenizer",))


@pytest.mark.model
@pytest.mark.parametrize(
    ("prompt", "mentions"),
    [("x" * 10_000_000, ("tokens",)), ("a\ud800b", ("surrogate",))],
    ids=["10 MB", "lone surrogate"],
)
def test_a_hostile_text(
    model_file: Callable[[str], Path], capfd: pytest.CaptureFixture[str], prompt: str, mentions: tuple[str, ...]
) -> None:
    path = model_file("SmolLM2-135M-Instruct.Q4_1.gguf")
    fails(capfd, "--model", str(path), "--prompt", prompt, "--kv-cache-memory-bytes", "100000000", mentions=mentions)


def test_an_unknown_variable_of_ours(folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CORE_CACHEE", "x")
    fails(capfd, *ids(folder), mentions=("VLLM_CORE_CACHEE", "VLLM_CORE_CACHE"))


def test_an_error_disturbs_nothing_else(folder: Path) -> None:
    from vllm_core import LLM, SamplingParams
    from vllm_core.errors import RequestError

    params = SamplingParams(temperature=0.0, max_tokens=4)
    with LLM(str(folder), kv_cache_memory_bytes=10_000_000) as llm:
        before = llm.generate([[1, 2, 3]], params, use_tqdm=False)
        with pytest.raises(RequestError):
            llm.generate([[1, 2, 3], [99999]], params, use_tqdm=False)
        after = llm.generate([[1, 2, 3]], params, use_tqdm=False)
        assert llm.get_metrics().running == 0
    assert before[0].outputs[0].token_ids == after[0].outputs[0].token_ids


@pytest.mark.parametrize("prompts", [5, None, [1.0, 2.0], [None], b"x"], ids=repr)
def test_prompts_of_a_wrong_type(folder: Path, prompts: object) -> None:
    from vllm_core import LLM
    from vllm_core.errors import RequestError

    with LLM(str(folder), kv_cache_memory_bytes=10_000_000) as llm, pytest.raises(RequestError):
        llm.generate(prompts, use_tqdm=False)


def test_one_llm_serves_one_call_at_a_time_and_none_after_its_end(folder: Path) -> None:
    from vllm_core import LLM, SamplingParams
    from vllm_core.errors import ConfigError, RequestError

    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with LLM(str(folder), kv_cache_memory_bytes=10_000_000) as llm:
        stream = llm.stream([1, 2, 3], params)
        next(stream)
        with pytest.raises(RequestError, match="in use"):
            llm.generate([[4]], params, use_tqdm=False)
        with pytest.raises(RequestError, match="wrong type"):
            llm.generate([[4]], {"temperature": 0}, use_tqdm=False)
        *_, last = stream
        assert len(last.outputs[0].token_ids) == 8
        assert len(llm.generate([[4]], params, use_tqdm=False)) == 1
    with pytest.raises(ConfigError, match="shut down"):
        llm.generate([[4]], params, use_tqdm=False)
