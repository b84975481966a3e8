"""Tensors of a GGUF file under their Hugging Face names and values, decoded to float32 one at a time.

What llama.cpp's converter did to them is undone here: Llama's query and key rows are put back from rotary pairs into
halves, Gemma's norms lose the one that was added to them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, BinaryIO

from vllm_core.errors import WeightsError
from vllm_core.loader.gguf_header import GGML_TYPES, GGUFHeader, TensorInfo

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from vllm_core.layers.shard import Wanted

    Values = NDArray[np.float32]

_CHUNK_ELEMENTS = 1 << 18
"""Elements decoded at once: bounds the decoder's temporaries, which then stay in the cache."""

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_GEMMA_LAYER = {
    **_LAYER,
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_NOT_WEIGHTS = frozenset({"rope_freqs.weight"})
"""Tensors that are part of the config; `gguf_config` reads them."""

_BLOCK_NAME = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)")


def hf_name(architecture: str, name: str) -> str | None:
    """The Hugging Face name of a tensor, or None where the architecture has no such tensor."""
    if name in _TOP:
        return _TOP[name]
    match = _BLOCK_NAME.fullmatch(name)
    layers = _GEMMA_LAYER if architecture == "gemma3" else _LAYER
    if match is None or match[2] not in layers:
        return None
    return f"model.layers.{match[1]}.{layers[match[2]]}.{match[3]}"


def iterate(header: GGUFHeader, config: Mapping[str, Any], wanted: Wanted | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor, or what is ``wanted`` of it, as float32, in file order.

    ``config`` is what `gguf_config` made of the header. Of a cut by rows only these are read and decoded; rows of quantised
    blocks cannot be read in part, so that a cut by columns takes them whole.
    Raises WeightsError for a tensor that the architecture does not have, or a file that became shorter.
    """
    import torch

    architecture = header.metadata["general.architecture"]
    with header.path.open("rb") as file:
        for info in header.tensors.values():
            if info.name in _NOT_WEIGHTS:
                continue
            name = hf_name(architecture, info.name)
            if name is None:
                raise WeightsError(
                    "Tensor has no place in the model",
                    on=f"{info.name} in {header.path}",
                    found=f"a tensor that {architecture} does not have",
                    expected="tensors of that architecture",
                    fix="check that general.architecture of the file is right",
                )
            cut = None if wanted is None else wanted(name, info.shape)
            if cut is None:
                yield name, torch.from_numpy(_undo(architecture, info, decode(file, info), config))
            elif cut.dim == 0:
                values = decode(file, info, cut.inside(info.shape))
                yield name, cut.fill(torch.from_numpy(_undo(architecture, info, values, config)))
            else:
                yield name, cut.take(torch.from_numpy(_undo(architecture, info, decode(file, info), config)))


def decode(file: BinaryIO, info: TensorInfo, rows: slice | None = None) -> Values:
    """Read one tensor, or some of its rows, and decode to float32. Raises WeightsError where the file ends before."""
    import numpy as np
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    kind, block_elements, block_bytes = GGML_TYPES[info.ggml_type]
    shape, offset = info.shape, info.offset
    if rows is not None:
        shape = (rows.stop - rows.start, *info.shape[1:])
        offset += info.size_bytes // info.shape[0] * rows.start
    out = np.empty(shape, dtype=np.float32)
    flat = out.reshape(-1)
    file.seek(offset)
    for start in range(0, flat.size, _CHUNK_ELEMENTS):
        target = flat[start : start + _CHUNK_ELEMENTS]
        size_bytes = target.size // block_elements * block_bytes
        # Read and not mapped: a file that is cut while it is read is then an error, not a SIGBUS.
        raw = file.read(size_bytes)
        if len(raw) != size_bytes:
            raise WeightsError(
                "GGUF file is cut off",
                on=f"{info.name} ({kind})",
                found=f"{len(raw)} bytes",
                expected=f"{size_bytes} bytes at offset {file.tell() - len(raw)}",
                fix="download the file again",
            )
        blocks = np.frombuffer(raw, dtype=np.uint8)[None]
        target[:] = dequantize(blocks, GGMLQuantizationType(info.ggml_type))[0]
    return out


def _undo(architecture: str, info: TensorInfo, values: Values, config: Mapping[str, Any]) -> Values:
    if architecture == "gemma3" and info.name.endswith("norm.weight"):
        values -= 1
        return values
    if architecture == "llama" and ".attn_q." in info.name:
        return _unpair(values, info.shape[0], config["num_attention_heads"], info.name)
    if architecture == "llama" and ".attn_k." in info.name:
        return _unpair(values, info.shape[0], config["num_key_value_heads"], info.name)
    return values


def _unpair(values: Values, rows: int, num_heads: int, name: str) -> Values:
    """Rows of each head from rotary pairs (x0, y0, x1, y1, ...) to halves (x0, x1, ..., y0, y1, ...).

    ``values`` are some heads of a tensor that has ``rows`` rows and ``num_heads`` heads in all.
    """
    if rows % (2 * num_heads):
        raise WeightsError(
            "Tensor has a wrong shape",
            on=name,
            found=f"{rows} rows",
            expected=f"a multiple of {2 * num_heads}, for {num_heads} heads",
            fix="check that the file's metadata belongs to its tensors",
        )
    paired = values.reshape(len(values) * num_heads // rows, rows // num_heads // 2, 2, *values.shape[1:])
    halves: Values = paired.swapaxes(1, 2).reshape(values.shape)
    return halves
