"""Models of `cpu.py peers`, made where they are not there: files for llama.cpp and us, folders of the same values for vLLM.

    PYTHON-OF-LLAMA cpu_models.py SOURCE.gguf KIND OUT.gguf

is how a file is rounded to another format, by llama.cpp itself, in its own environment.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE_TYPES = {"f16": 1, "q8_0": 7, "bf16": 32}
"""`enum llama_ftype`."""

QWEN3: Mapping[str, int] = {
    "layers": 28,
    "hidden": 1024,
    "intermediate": 3072,
    "heads": 16,
    "kv_heads": 8,
    "head_size": 128,
    "vocabulary": 151936,
}


@dataclass(frozen=True)
class Model:
    """One file. ``checkpoint`` is shared by files of the same values; ``kv_numbers``: keys and values of a token, of all
    layers; ``dummy``: weights are drawn, vLLM draws its own."""

    checkpoint: str
    kind: str
    kv_numbers: int
    dummy: bool = False


MODELS: Mapping[str, Model] = {
    "q4_1": Model("smollm2-135m", "q4_1", 30 * 2 * 192),
    "q8_0": Model("smollm2-135m", "q8_0", 30 * 2 * 192),
    "bf16": Model("smollm2-135m", "bf16", 30 * 2 * 192),
    "qwen3-bf16": Model("qwen3-0.6b", "bf16", 28 * 2 * 1024, dummy=True),
    "qwen3-q8_0": Model("qwen3-0.6b", "q8_0", 28 * 2 * 1024, dummy=True),
}


class Models:
    """Files and folders in one place; ``llama`` is the Python that rounds files."""

    def __init__(self, folder: Path, llama: str | None) -> None:
        self._folder, self._llama = folder, llama
        folder.mkdir(parents=True, exist_ok=True)

    def file(self, what: str) -> Path:
        """The GGUF file of a model."""
        model = MODELS[what]
        if what == "q4_1":
            return demo()
        path = self._folder / f"{model.checkpoint}-{model.kind}.gguf"
        if path.exists():
            return path
        if what == "qwen3-bf16":
            write_qwen3(path)
            return path
        if self._llama is None:
            sys.exit(f"{what} is made by llama.cpp: --llama, or put it to {path}")
        source = self.file("qwen3-bf16") if model.dummy else demo()
        subprocess.run([self._llama, __file__, str(source), model.kind, str(path)], check=True, stdout=sys.stderr)
        return path

    def folder_of(self, checkpoint: str, dtype: str) -> Path:
        """A Hugging Face folder of a checkpoint's values in ``dtype``; a dummy's has a config alone."""
        path = self._folder / f"{checkpoint}-{dtype}"
        if not (path / "config.json").exists():
            if checkpoint == "qwen3-0.6b":
                write_config(path)
            else:
                export(demo(), path, dtype)
        return path


def demo() -> Path:
    """The demo model's file, fetched where it is not there."""
    from vllm_core.loader.locate import locate

    found = locate("demo")
    assert found is not None, "it is a file or an error"
    return found


def export(file: Path, folder: Path, dtype: str) -> None:
    """Decode a GGUF file into a folder, with its tokenizer, by transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    whole = GgufConfig(dequantize=True)
    where = {"gguf_file": file.name, "dtype": torch.float32, "quantization_config": whole}
    model = AutoModelForCausalLM.from_pretrained(file.parent, **where)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


def write_config(folder: Path) -> None:
    """The shape of Qwen3-0.6B as a config."""
    from transformers import Qwen3Config

    shape = QWEN3
    Qwen3Config(
        vocab_size=shape["vocabulary"],
        hidden_size=shape["hidden"],
        intermediate_size=shape["intermediate"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        head_dim=shape["head_size"],
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        architectures=["Qwen3ForCausalLM"],
    ).save_pretrained(folder)


def write_qwen3(path: Path) -> None:
    """A GGUF file of that shape: bfloat16 weights uniform within 0.05, tokens that are numbers."""
    import gguf
    import numpy as np

    shape, random = QWEN3, np.random.default_rng(0)
    part = path.with_suffix(".part")
    writer = gguf.GGUFWriter(part, "qwen3")
    _describe(writer)
    query, keys = shape["heads"] * shape["head_size"], shape["kv_heads"] * shape["head_size"]
    hidden, inner = shape["hidden"], shape["intermediate"]
    matrices = {
        "attn_q": (query, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_output": (hidden, query),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    norms = {"attn_norm": hidden, "ffn_norm": hidden, "attn_q_norm": shape["head_size"], "attn_k_norm": shape["head_size"]}

    def add_matrix(name: str, rows: int, columns: int) -> None:
        values = random.random((rows, columns), dtype=np.float32) * 0.1 - 0.05
        raw = (values.view(np.uint32) >> 16).astype(np.uint16)
        writer.add_tensor(name, raw.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)

    add_matrix("token_embd.weight", shape["vocabulary"], hidden)
    writer.add_tensor("output_norm.weight", np.ones(hidden, dtype=np.float32))
    for layer in range(shape["layers"]):
        for name, (rows, columns) in matrices.items():
            add_matrix(f"blk.{layer}.{name}.weight", rows, columns)
        for name, size in norms.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(size, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(path)


def _describe(writer: Any) -> None:
    """Metadata and a byte-level tokenizer: all bytes, the token of its one merge, then words of digits that nothing makes."""
    from tokenizers.pre_tokenizers import ByteLevel

    shape = QWEN3
    writer.add_context_length(4096)
    writer.add_embedding_length(shape["hidden"])
    writer.add_block_count(shape["layers"])
    writer.add_feed_forward_length(shape["intermediate"])
    writer.add_head_count(shape["heads"])
    writer.add_head_count_kv(shape["kv_heads"])
    writer.add_key_length(shape["head_size"])
    writer.add_value_length(shape["head_size"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    alphabet = sorted(ByteLevel.alphabet())
    words = (f"<{number}>" for number in range(len(alphabet) + 1, shape["vocabulary"]))
    tokens = [*alphabet, alphabet[0] + alphabet[1], *words]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges([f"{alphabet[0]} {alphabet[1]}"])
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_bos_token_id(len(tokens) - 1)
    writer.add_add_bos_token(False)


def requantise(source: str, kind: str, target: str) -> None:
    """Round a file to another format by llama.cpp."""
    import ctypes

    llama_cpp = __import__("llama_cpp")
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize, params.nthread = FILE_TYPES[kind], True, os.cpu_count() or 1
    part = f"{target}.part"
    status = llama_cpp.llama_model_quantize(source.encode(), part.encode(), ctypes.byref(params))
    if status:
        sys.exit(f"llama.cpp returned {status} for {source} as {kind}")
    Path(part).rename(target)


if __name__ == "__main__":
    requantise(*sys.argv[1:])
