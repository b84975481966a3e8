"""`decode_layers`: all layers of a dense decoder by the kernel of `flat`, where that takes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_core.api import DecoderLayer, DecoderLayers, UnsupportedError
from vllm_cuda import flat, linear
from vllm_cuda.backends import flat as tuning
from vllm_cuda.backends import hopper
from vllm_cuda.flat import Rows
from vllm_triton.kernels.codec import PLAIN
from vllm_triton.ops.cache import KV
from vllm_triton.ops.linear import Packed
from vllm_triton.tuning import active

_AT_ONCE = 16
"""Bytes that are copied or read at once."""


@dataclass(frozen=True, slots=True)
class _Stack:
    """What the kernel reads of all layers. Their memory may have another place after a sleep, so addresses are asked anew."""

    tensors: tuple[Tensor | None, ...]
    tokens_per_block: int
    block_stride: int
    tables: dict[tuple[int, ...], Tensor]

    def addresses(self, device: torch.device) -> Tensor:
        """int64 [layers, 9] on the device; one that a captured step has stays."""
        found = tuple(0 if tensor is None else tensor.data_ptr() for tensor in self.tensors)
        table = self.tables.get(found)
        if table is None:
            table = self.tables[found] = torch.tensor(found, dtype=torch.int64).to(device)
        return table


def decode_layers(
    residual: Tensor, layers: DecoderLayers, positions: Tensor, slot_mapping: Tensor, seq_lens: Tensor, block_table: Tensor
) -> bool:
    """All layers for residual [S,H], one token of each row; whether it was done. Raises UnsupportedError for other dtypes."""
    if residual.dtype != torch.bfloat16:
        raise UnsupportedError(
            "Layers at once have no kernel",
            on="decode_layers",
            found=str(residual.dtype).removeprefix("torch."),
            expected="bfloat16",
            fix="--deny-provider vllm-cuda-flat",
        )
    on, key = active(), "vllm-cuda"
    if on.family != hopper.TUNING.family or not residual.is_contiguous() or residual.data_ptr() % _AT_ONCE:
        return False
    if key not in layers.made:
        layers.made[key] = _stack_of(layers)
    stack = layers.made[key]
    if not isinstance(stack, _Stack):
        return False
    sizes = (layers.hidden_size, layers.intermediate_size, layers.num_heads, layers.num_kv_heads, layers.head_size)
    norm = layers.layers[0].q_norm is not None
    form = tuning.form_of(len(residual), sizes, len(layers.layers), norm, stack.tokens_per_block, on.multiprocessors)
    if form is None:
        return False
    rows = Rows(positions, seq_lens, block_table, slot_mapping)
    table = stack.addresses(residual.device)
    flat.launch(residual, table, layers.cos_sin, rows, stack.block_stride, layers.eps, layers.scale, form)
    return True


def _stack_of(layers: DecoderLayers) -> _Stack | None:
    """None where some layer is not as the kernel reads them."""
    caches = [layer.kv for layer in layers.layers]
    if layers.activation != "silu" or not all(_is_plain(kv) for kv in caches):
        return None
    if len({(kv.tokens_per_block, kv.block_stride) for kv in caches}) != 1 or layers.cos_sin.shape[2] * 2 != layers.head_size:
        return None
    if len({norm is None for layer in layers.layers for norm in (layer.q_norm, layer.k_norm)}) != 1:
        return None
    tensors: list[Tensor | None] = []
    for layer in layers.layers:
        weights = list(_weights_of(layer))
        if len(weights) != 4:
            return None
        tensors += [*weights, layer.input_norm, layer.mlp_norm, layer.q_norm, layer.k_norm, layer.kv.blocks]
    if not _aligned((*tensors, layers.cos_sin)):
        return None
    return _Stack(tuple(tensors), caches[0].tokens_per_block, caches[0].block_stride, {})


def _is_plain(kv: object) -> bool:
    return isinstance(kv, KV) and kv.kind == PLAIN.value and kv.blocks.dtype == torch.bfloat16


def _weights_of(layer: DecoderLayer) -> Iterator[Tensor]:
    """Those of its products that are plain bfloat16 without a bias."""
    for packed in (layer.qkv, layer.out, layer.gate_up, layer.down):
        plain = packed.shared if isinstance(packed, linear.Packed) else packed
        if isinstance(plain, Packed) and plain.bias is None and plain.weight.dtype == torch.bfloat16:
            yield plain.weight


def _aligned(tensors: Sequence[Tensor | None]) -> bool:
    return all(one is None or (one.is_contiguous() and one.data_ptr() % _AT_ONCE == 0) for one in tensors)
