"""The `config.json` that a GGUF file does not have, made from its metadata. Torch-free.

Everything that the file states is set; what llama.cpp hard-codes for an architecture is hard-coded here too.
"""

from __future__ import annotations

import math
import struct
from typing import Any

from vllm_core.errors import ModelConfigError
from vllm_core.loader.gguf_header import GGUFHeader

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
"""`general.architecture` of the files that can be read, and the Hugging Face class."""

_MODEL_TYPES = {"gemma3": "gemma3_text", "qwen3moe": "qwen3_moe"}
_WITH_EXPERTS = frozenset({"llama", "qwen3moe"})
"""Architectures whose files may have experts. Llama with experts is Mixtral: llama.cpp has one name for both."""

_GEMMA_PERIOD, _GEMMA_LOCAL_THETA, _GEMMA_27B_LAYERS = 6, 10000.0, 62
_F32, _F16, _BF16 = 0, 1, 30
_MISSING = object()


def config_of(header: GGUFHeader) -> dict[str, Any]:
    """Make the config. Raises ModelConfigError for an unknown architecture, or a key that is missing or of a wrong type."""
    reader = _Reader(header)
    heads, hidden = reader.number("attention.head_count"), reader.number("embedding_length")
    head_dim = reader.number("attention.key_length", reader.number("rope.dimension_count", hidden // heads))
    architecture = reader.architecture
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": _MODEL_TYPES.get(architecture, architecture),
        "hidden_size": hidden,
        "intermediate_size": reader.number("feed_forward_length"),
        "num_hidden_layers": reader.number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": reader.number("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": reader.number("context_length"),
        "rms_norm_eps": reader.real("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "vocab_size": _vocab_size(header),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
        "torch_dtype": _dtype(header),
        **_special_ids(header),
        **_experts(reader),
    }
    rope = _rope(reader)
    rotary = reader.number("rope.dimension_count", head_dim)
    if rotary != head_dim:
        rope["partial_rotary_factor"] = config["partial_rotary_factor"] = rotary / head_dim
    config["rope_theta"] = rope["rope_theta"]
    if architecture == "gemma3":
        return config | _gemma3(reader, rope, config)
    if rope["rope_type"] != "default":
        config["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    return config | {"rope_parameters": rope, "sliding_window": None}


def generation_config_of(header: GGUFHeader) -> dict[str, Any]:
    """Ids that end a sequence: end of text, and end of turn where the file names one."""
    ids = [header.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    ends = list(dict.fromkeys(token for token in ids if isinstance(token, int)))
    return {**_special_ids(header), "eos_token_id": ends} if ends else {}


def _special_ids(header: GGUFHeader) -> dict[str, int]:
    names = {"bos": "bos", "eos": "eos", "pad": "padding"}
    found = {f"{ours}_token_id": header.metadata.get(f"tokenizer.ggml.{theirs}_token_id") for ours, theirs in names.items()}
    return {key: value for key, value in found.items() if isinstance(value, int)}


def _vocab_size(header: GGUFHeader) -> int:
    embedding = header.tensors.get("token_embd.weight")
    if embedding is not None and len(embedding.shape) == 2:
        return embedding.shape[0]
    return len(header.metadata.get("tokenizer.ggml.tokens", ()))


def _dtype(header: GGUFHeader) -> str:
    """What the weights were before quantization is not stated, so quantized ones count as the float32 they decode to."""
    types = {info.ggml_type for info in header.tensors.values()}
    if not types <= {_F32, _F16, _BF16}:
        return "float32"
    return "bfloat16" if _BF16 in types else "float16" if _F16 in types else "float32"


def _experts(reader: _Reader) -> dict[str, Any]:
    """The experts of each layer; in both architectures llama.cpp divides the chosen ones' shares by their sum."""
    if not reader.get("expert_count", 0):
        return {}
    count, chosen = reader.number("expert_count"), reader.number("expert_used_count")
    if reader.architecture == "llama":
        mixtral = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": count}
        return {**mixtral, "num_experts_per_tok": chosen}
    inner = reader.number("expert_feed_forward_length")
    return {"num_experts": count, "num_experts_per_tok": chosen, "moe_intermediate_size": inner, "norm_topk_prob": True}


def _gemma3(reader: _Reader, rope: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    layers, period = config["num_hidden_layers"], reader.number("attention.sliding_window_pattern", _GEMMA_PERIOD)
    # llama.cpp knows the 27B model, which scales by hidden size over heads, by its number of layers too.
    wide = layers == _GEMMA_27B_LAYERS
    local = reader.real("rope.freq_base_swa", _GEMMA_LOCAL_THETA)
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_act": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"] if wide else config["head_dim"],
        "sliding_window": reader.number("attention.sliding_window"),
        "sliding_window_pattern": period,
        "layer_types": ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(layers)],
        "rope_local_base_freq": local,
        "rope_parameters": {
            "full_attention": rope,
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }


def _rope(reader: _Reader) -> dict[str, Any]:
    theta = reader.real("rope.freq_base", 10000.0)
    kind = reader.get("rope.scaling.type", "none")
    if "rope_freqs.weight" in reader.header.tensors:
        return {"rope_theta": theta, **_llama3(reader, theta)}
    if kind == "none":
        return {"rope_theta": theta, "rope_type": "default"}
    if kind not in ("linear", "yarn"):
        raise reader.wrong("rope.scaling.type", repr(kind), "none, linear or yarn")
    scaling: dict[str, Any] = {"rope_theta": theta, "rope_type": kind, "factor": reader.real("rope.scaling.factor")}
    optional = {
        "rope.scaling.original_context_length": "original_max_position_embeddings",
        "rope.scaling.attn_factor": "attention_factor",
        "rope.scaling.yarn_beta_fast": "beta_fast",
        "rope.scaling.yarn_beta_slow": "beta_slow",
    }
    if kind == "yarn":
        found = {name: reader.get(key, None) for key, name in optional.items()}
        scaling |= {name: value for name, value in found.items() if value is not None}
    return scaling


def _llama3(reader: _Reader, theta: float) -> dict[str, Any]:
    """Llama 3's scaling from the divisors that llama.cpp's converter made of it.

    The converter does not keep the four numbers. All published models take 1, 4 and 8192; this is believed only where
    it gives the stored divisors.
    """
    info = reader.header.tensors["rope_freqs.weight"]
    if info.ggml_type != _F32:
        raise reader.wrong("rope_freqs.weight", f"type {info.ggml_type}", "float32")
    with reader.header.path.open("rb") as file:
        file.seek(info.offset)
        stored = struct.unpack(f"<{info.size_bytes // 4}f", file.read(info.size_bytes))
    low, high, original, factor = 1.0, 4.0, 8192, max(stored, default=0.0)
    for index, divisor in enumerate(stored):
        wavelength = 2 * math.pi * theta ** (2 * index / (2 * len(stored)))
        smooth = (original / wavelength - low) / (high - low)
        expected = 1.0 if smooth > 1 else factor if smooth < 0 else 1 / ((1 - smooth) / factor + smooth)
        if not math.isclose(divisor, expected, rel_tol=1e-3):
            raise reader.wrong("rope_freqs.weight", f"{divisor} at {index}", f"{expected:.6g}, by Llama 3's rule")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


class _Reader:
    """Typed access to the keys of the file's architecture."""

    def __init__(self, header: GGUFHeader) -> None:
        self.header = header
        found = header.metadata.get("general.architecture")
        with_experts = bool(header.metadata.get(f"{found}.expert_count"))
        if found not in ARCHITECTURES or (with_experts and found not in _WITH_EXPERTS):
            raise ModelConfigError(
                "Architecture of the GGUF file is unknown",
                on=str(header.path),
                found=f"{found!r}" + (" with experts" if found in ARCHITECTURES else ""),
                expected=f"one of {', '.join(ARCHITECTURES)}; with experts one of {', '.join(sorted(_WITH_EXPERTS))}",
                fix="take the model's Hugging Face folder instead: the transformers track knows more architectures",
            )
        self.architecture: str = found

    def get(self, key: str, default: Any) -> Any:
        """The value of ``<architecture>.<key>``."""
        return self.header.metadata.get(f"{self.architecture}.{key}", default)

    def number(self, key: str, default: Any = _MISSING) -> int:
        """A positive integer."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.wrong(key, "nothing" if value is _MISSING else repr(value)[:80], "a positive integer")
        return value

    def real(self, key: str, default: Any = _MISSING) -> float:
        """A positive, finite number."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise self.wrong(key, "nothing" if value is _MISSING else repr(value)[:80], "a positive number")
        return float(value)

    def wrong(self, key: str, found: str, expected: str) -> ModelConfigError:
        """The error for ``key``."""
        return ModelConfigError(
            "GGUF metadata cannot be used",
            on=f"{self.architecture}.{key} in {self.header.path}",
            found=found,
            expected=expected,
            fix="download the file again, or convert the model anew",
        )
