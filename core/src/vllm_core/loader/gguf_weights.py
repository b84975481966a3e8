"""Tensors of a GGUF file under their Hugging Face names and values, one at a time; quantised ones stay packed.

What llama.cpp's converter did to them is undone here: Llama's query and key rows are put back from rotary pairs into
halves, Gemma's norms lose the one that was added to them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias, cast

from vllm_core.api import QuantTensor
from vllm_core.errors import WeightsError
from vllm_core.loader.gguf_header import GGML_TYPES, GGUFHeader, TensorInfo

if TYPE_CHECKING:
    import io

    import numpy as np
    import torch
    from numpy.typing import NDArray

    from vllm_core.layers.shard import Cut, Wanted

    Values: TypeAlias = NDArray[np.float32]
    Bytes: TypeAlias = NDArray[np.uint8]
    Undo: TypeAlias = Callable[[NDArray[Any]], NDArray[Any]]

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
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
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

_FLOATS = {"F32": "<f4", "F16": "<f2"}
"""Types that are numbers as they lie in the file: the `gguf` package, which takes long to import, is not needed for them."""

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


def iterate(
    header: GGUFHeader, config: Mapping[str, Any], wanted: Wanted | None = None
) -> Iterator[tuple[str, torch.Tensor | QuantTensor]]:
    """Yield each tensor, or what is ``wanted`` of it, in file order: matrices of blocks packed, others as float32.

    ``config`` is what `gguf_config` made of the header. Of a cut by rows only these are read; a cut by columns takes rows
    whole where it would part a block.
    Raises WeightsError for a tensor that the architecture does not have, or a file that became shorter.
    """
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
            yield name, _read(file, info, cut, partial(_undo, architecture, info, config))


def _read(file: BinaryIO, info: TensorInfo, cut: Cut | None, undo: Undo) -> torch.Tensor | QuantTensor:
    """What is kept of one tensor, or all of it where a cut would part a block."""
    import torch

    from vllm_core.ops import quant

    rows = cut.inside(info.shape) if cut is not None and cut.dim == 0 else None
    kind, block, block_bytes = GGML_TYPES[info.ggml_type]
    if block == 1 or len(info.shape) < 2:
        values = torch.from_numpy(undo(decode(file, info, rows)))
        if cut is None:
            return values
        return cut.fill(values) if rows is not None else cut.take(values)
    data = undo(read_bytes(file, info, rows))
    if len(info.shape) > 2:  # stacked experts: a matrix of all their rows
        data = data.reshape(-1, info.shape[-1] // block * block_bytes)
    whole = QuantTensor(kind.lower(), (len(data), info.shape[-1]), torch.from_numpy(data))
    if cut is None:
        return whole
    if rows is not None:
        return quant.pad_rows(whole, cut.end - cut.begin)
    return cut.take_packed(whole) or whole


def read_bytes(file: BinaryIO, info: TensorInfo, rows: slice | None = None) -> Bytes:
    """Read one tensor, or some of its rows, as uint8 [rows, bytes of a row]. Raises WeightsError where the file ends before.

    The rows of a vector are its blocks.
    """
    import numpy as np

    kind, block, block_bytes = GGML_TYPES[info.ggml_type]
    count = info.shape[0] if len(info.shape) > 1 else info.shape[0] // block
    row_bytes = info.size_bytes // count if count else block_bytes
    begin, end = (0, count) if rows is None else (rows.start, rows.stop)
    out = np.empty((end - begin, row_bytes), dtype=np.uint8)
    file.seek(info.offset + begin * row_bytes)
    # Read and not mapped: a file that is cut while it is read is then an error, not a SIGBUS.
    got = cast("io.BufferedReader", file).readinto(out.reshape(-1).data)
    if got != out.nbytes:
        raise WeightsError(
            "GGUF file is cut off",
            on=f"{info.name} ({kind})",
            found=f"{got} bytes",
            expected=f"{out.nbytes} bytes at offset {file.tell() - got}",
            fix="download the file again",
        )
    return out


def decode(file: BinaryIO, info: TensorInfo, rows: slice | None = None) -> Values:
    """Read one tensor, or some of its rows, and decode to float32. Raises WeightsError where the file ends before."""
    import numpy as np

    raw = read_bytes(file, info, rows)
    shape = info.shape if rows is None else (rows.stop - rows.start, *info.shape[1:])
    kind = GGML_TYPES[info.ggml_type][0]
    if kind in _FLOATS:  # norms and biases: all that a file has beside packed matrices
        values = raw.view(_FLOATS[kind])
    else:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        values = dequantize(raw, GGMLQuantizationType(info.ggml_type))
    return np.ascontiguousarray(values.reshape(shape), dtype=np.float32)


def _undo(architecture: str, info: TensorInfo, config: Mapping[str, Any], values: NDArray[Any]) -> NDArray[Any]:
    """Values or packed rows of a tensor as its checkpoint had them."""
    if architecture == "gemma3" and info.name.endswith("norm.weight"):
        values -= 1
        return values
    if architecture == "llama" and ".attn_q." in info.name:
        return _unpair(values, info.shape[0], config["num_attention_heads"], info.name)
    if architecture == "llama" and ".attn_k." in info.name:
        return _unpair(values, info.shape[0], config["num_key_value_heads"], info.name)
    return values


def _unpair(values: NDArray[Any], rows: int, num_heads: int, name: str) -> NDArray[Any]:
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
    halves: NDArray[Any] = paired.swapaxes(1, 2).reshape(values.shape)
    return halves
