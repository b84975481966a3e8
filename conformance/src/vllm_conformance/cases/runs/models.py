"""Tiny models with random weights, written once in a process: small enough for any device, of sizes that kernels are made for.

Weights are bfloat16 values drawn by name, so that they are the same numbers in every dtype, and large enough that tokens
depend on all of the context.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

VOCAB = 320
END = 256
HIDDEN, INNER, HEADS, KV_HEADS, HEAD_SIZE, LAYERS = 128, 192, 4, 2, 64, 2
MAX_LEN = 512
WINDOW = 24

_DECODER: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_SIZE,
    "max_position_embeddings": MAX_LEN,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": END,
}
_GEMMA = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": WINDOW,
    "query_pre_attn_scalar": HEAD_SIZE,
    "hidden_activation": "gelu_pytorch_tanh",
}
_EXPERTS = {"num_experts_per_tok": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
# Fused projections, and a head size that follows from the hidden size.
_PHI = {"hidden_size": HEADS * HEAD_SIZE, "pad_token_id": 0, "bos_token_id": 1, "sliding_window": None}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "llama": {**_DECODER, "architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "qwen2": {**_DECODER, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {**_DECODER, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "gemma3": {**_DECODER, **_GEMMA, "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"},
    "mixtral": {**_DECODER, **_EXPERTS, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    | {"num_local_experts": 4, "sliding_window": None},
    "qwen3_moe": {**_DECODER, **_EXPERTS, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    | {"num_experts": 6, "moe_intermediate_size": 96, "norm_topk_prob": True, "mlp_only_layers": [0], "decoder_sparse_step": 1},
    "phi3": {**_DECODER, **_PHI, "architectures": ["Phi3ForCausalLM"], "model_type": "phi3"},
    "gpt_oss": {**_DECODER, **_EXPERTS, "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"}
    | {"num_local_experts": 4, "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "capped": {**_DECODER, **_GEMMA, "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
    | {"layer_types": ["full_attention"] * 3, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0},
    "speed": {**_DECODER, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    | {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8}
    | {"num_key_value_heads": 4, "max_position_embeddings": 2048, "tie_word_embeddings": True},
    "bert": {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HIDDEN // HEAD_SIZE,
        "max_position_embeddings": MAX_LEN,
        "type_vocab_size": 2,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
    },
}
TRANSFORMERS = frozenset({"phi3", "gpt_oss"})
"""Models that run on the transformers track."""

OPTIONAL = frozenset({"qwen2", "qwen3", "mixtral", "qwen3_moe", "phi3"})
"""Models that need no capability beside the required ones, and that a platform may refuse all the same."""


@cache
def folder_of(name: str) -> Path:
    """Write a model and return its folder, which goes with the process's temporary files."""
    config = CONFIGS[name]
    folder = scratch() / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(dict(_weights(name, config)), str(folder / "model.safetensors"))
    if name == "bert":
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}', encoding="utf-8")
    return folder


def scratch() -> Path:
    """A folder that goes with the process."""
    return Path(_root().name)


@cache
def _root() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="vllm-conformance-models-")


def _weights(name: str, config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    shapes = _bert(config) if name == "bert" else _decoder(name, config)
    for key, shape in shapes:
        yield key, _draw(key, shape, config)


def _draw(key: str, shape: tuple[int, ...], config: Mapping[str, Any]) -> Tensor:
    """Norms about 1 (0 where the architecture adds 1), biases small, sinks as large as scores, matrices so that their products
    are about 1.5."""
    seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=7).digest(), "little")
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if key.endswith("sinks"):
        return (2 * noise).to(torch.bfloat16)
    if len(shape) == 1:
        is_norm = key.endswith("weight")
        offset = 1.0 if is_norm and "gemma3" not in str(config["model_type"]) else 0.0
        return (offset + 0.1 * noise).to(torch.bfloat16)
    scale = 1.0 if "embed" in key and not config.get("tie_word_embeddings") else 1.5 * shape[-1] ** -0.5
    return (scale * noise).to(torch.bfloat16)


def _decoder(name: str, config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, size = config["hidden_size"], HEAD_SIZE
    q, kv, vocab = config["num_attention_heads"] * size, config["num_key_value_heads"] * size, config["vocab_size"]
    yield "model.embed_tokens.weight", (vocab, hidden)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        if name == "phi3":
            yield f"{layer}self_attn.qkv_proj.weight", (q + 2 * kv, hidden)
        else:
            yield from (
                (f"{layer}self_attn.{part}_proj.weight", (rows, hidden)) for part, rows in zip("qkv", (q, kv, kv), strict=True)
            )
        if name == "qwen2":
            yield from ((f"{layer}self_attn.{part}_proj.bias", (rows,)) for part, rows in zip("qkv", (q, kv, kv), strict=True))
        if name == "gpt_oss":
            biases = zip("qkvo", (q, kv, kv, hidden), strict=True)
            yield from ((f"{layer}self_attn.{part}_proj.bias", (rows,)) for part, rows in biases)
            yield f"{layer}self_attn.sinks", (config["num_attention_heads"],)
        if config["model_type"] in ("qwen3", "qwen3_moe", "gemma3_text"):
            yield from ((f"{layer}self_attn.{part}_norm.weight", (size,)) for part in "qk")
        yield f"{layer}self_attn.o_proj.weight", (hidden, q)
        yield from _mlp(layer, name, index, config)
        norms = ["input_layernorm", "post_attention_layernorm"]
        if config["model_type"] == "gemma3_text":
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        yield from ((f"{layer}{norm}.weight", (hidden,)) for norm in norms)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocab, hidden)


def _mlp(layer: str, name: str, index: int, config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    if name == "mixtral":
        yield f"{layer}block_sparse_moe.gate.weight", (config["num_local_experts"], hidden)
        for expert in range(config["num_local_experts"]):
            each = f"{layer}block_sparse_moe.experts.{expert}."
            yield from ((f"{each}w{n}.weight", (hidden, inner) if n == 2 else (inner, hidden)) for n in (1, 2, 3))
        return
    if name == "gpt_oss":
        count = config["num_local_experts"]
        yield from ((f"{layer}mlp.router.{part}", (count, *size)) for part, size in (("weight", (hidden,)), ("bias", ())))
        for part, inputs, outputs in (("gate_up", hidden, 2 * inner), ("down", inner, hidden)):
            yield f"{layer}mlp.experts.{part}_proj", (count, inputs, outputs)
            yield f"{layer}mlp.experts.{part}_proj_bias", (count, outputs)
        return
    places = [f"{layer}mlp."]
    if name == "qwen3_moe" and index not in config["mlp_only_layers"]:
        yield f"{layer}mlp.gate.weight", (config["num_experts"], hidden)
        inner = config["moe_intermediate_size"]
        places = [f"{layer}mlp.experts.{expert}." for expert in range(config["num_experts"])]
    for place in places:
        if name == "phi3":
            yield f"{place}gate_up_proj.weight", (2 * inner, hidden)
        else:
            yield from ((f"{place}{part}_proj.weight", (inner, hidden)) for part in ("gate", "up"))
        yield f"{place}down_proj.weight", (hidden, inner)


def _bert(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    yield "embeddings.word_embeddings.weight", (VOCAB, hidden)
    yield "embeddings.position_embeddings.weight", (MAX_LEN, hidden)
    yield "embeddings.token_type_embeddings.weight", (2, hidden)
    norms, dense = ["embeddings.LayerNorm"], []
    for index in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{index}."
        dense += [(f"{layer}attention.self.{part}", hidden, hidden) for part in ("query", "key", "value")]
        dense += [(f"{layer}attention.output.dense", hidden, hidden)]
        dense += [(f"{layer}intermediate.dense", inner, hidden), (f"{layer}output.dense", hidden, inner)]
        norms += [f"{layer}attention.output.LayerNorm", f"{layer}output.LayerNorm"]
    for name, rows, columns in dense:
        yield f"{name}.weight", (rows, columns)
        yield f"{name}.bias", (rows,)
    for name in norms:
        yield f"{name}.weight", (hidden,)
        yield f"{name}.bias", (hidden,)


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer beside the model: a token a byte, and `END`. For servers, which speak text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}', encoding="utf-8")
