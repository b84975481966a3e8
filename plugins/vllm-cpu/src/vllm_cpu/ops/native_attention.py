"""The family ``kv``, rotary embedding and attention without a cache, through the C ABI. Oracle: `vllm_core.ops.attention`."""

from __future__ import annotations

import ctypes
import operator
from typing import Any

from torch import Tensor

from vllm_cpu.native_kv import CKV, KV_DTYPES
from vllm_cpu.ops.native_call import DTYPES, function, packer

_pack_write = packer("PPPPqqqq")
_pack_blocks = packer("PPPPq")
_pack_heads = packer("PPPPqqqqqqqqqPPPPPqd")
_pack_attention = packer("PPPPPPqqqqqqqddP")
_pack_encoder = packer("PPPPPqqqqqqqqqd")
_kv_write, _kv_copy, _kv_export, _kv_import = map(function, ("kv_write", "kv_copy", "kv_export", "kv_import"))
_rotary_embedding, _qk_norm_rope_kv_write = map(function, ("rotary_embedding", "qk_norm_rope_kv_write"))
_paged_attention, _encoder_attention = map(function, ("paged_attention", "encoder_attention"))


class KV:
    """One layer's blocks in the library's layout: `address` of its struct, which lives as long as this does."""

    __slots__ = ("_memory", "_struct", "address", "attention", "write")

    attention: tuple[tuple[Any, ...], bytes]
    write: tuple[tuple[Any, ...], bytes]
    """Arguments of the last call, and the struct that was made of them: decode steps come with the same tensors."""

    def __init__(self, memory: Tensor, num_kv_heads: int, head_size: int, dtype: str, tokens_per_block: int) -> None:
        blocks, size = memory.shape
        self._memory = memory
        self._struct = CKV(memory.data_ptr(), blocks, size, num_kv_heads, head_size, tokens_per_block, KV_DTYPES[dtype])
        self.address = ctypes.addressof(self._struct)
        self.attention = self.write = ((), b"")


def kv_bind(memory: Tensor, num_kv_heads: int, head_size: int, dtype: str, tokens_per_block: int) -> KV:
    """View uint8 [num_blocks, block_bytes]."""
    return KV(memory, num_kv_heads, head_size, dtype, tokens_per_block)


def kv_write(kv: KV, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    """Store [T,Hk,D] at int64 [T] slots."""
    pointers = kv.address, k.data_ptr(), v.data_ptr(), slot_mapping.data_ptr()
    _kv_write(_pack_write(0, *pointers, k.stride()[0], v.stride()[0], k.shape[0], DTYPES[k.dtype]), k, v, slot_mapping, kv)


def kv_copy(kv: KV, source: Tensor, target: Tensor) -> None:
    """Copy whole blocks."""
    _kv_copy(_pack_blocks(0, kv.address, 0, source.data_ptr(), target.data_ptr(), source.shape[0]), source, target, kv)


def kv_export(out: Tensor, kv: KV, blocks: Tensor) -> None:
    """Write float32 [N,2,tokens_per_block,Hk,D]."""
    _kv_export(_pack_blocks(0, kv.address, out.data_ptr(), blocks.data_ptr(), 0, blocks.shape[0]), out, blocks, kv)


def kv_import(kv: KV, blocks: Tensor, target: Tensor) -> None:
    """The inverse of `kv_export`."""
    _kv_import(_pack_blocks(0, kv.address, blocks.data_ptr(), 0, target.data_ptr(), target.shape[0]), blocks, target, kv)


def rotary_embedding(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool) -> None:
    """Rotate the first ``2 * cos_sin.shape[2]`` elements of each head of q and k in place."""
    tokens, q_heads, size = q.shape
    pointers = q.data_ptr(), k.data_ptr(), positions.data_ptr(), cos_sin.data_ptr()
    sizes = q.stride()[0], k.stride()[0], tokens, q_heads, k.shape[1], size, 2 * cos_sin.shape[2], int(interleaved)
    _rotary_embedding(_pack_heads(0, *pointers, *sizes, DTYPES[q.dtype], 0, 0, 0, 0, 0, 0, 0.0), q, k, positions, cos_sin)


def qk_norm_rope_kv_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    positions: Tensor,
    cos_sin: Tensor | None,
    interleaved: bool,
    kv: KV,
    slot_mapping: Tensor,
) -> None:
    """Norms where there are weights, rotation where there is a table, then the write."""
    given = (q, k, v, q_weight, k_weight, eps, positions, cos_sin, interleaved, slot_mapping)
    last, arguments = kv.write
    if not _same(last, given):
        arguments = _heads(*given, kv)
        kv.write = (given, arguments)
    _qk_norm_rope_kv_write(arguments, *given, kv)


def _same(last: tuple[Any, ...], given: tuple[Any, ...]) -> bool:
    """Whether these are the same objects: two tensors that are equal may lie at other addresses."""
    return len(last) == len(given) and all(map(operator.is_, last, given))


def _heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    positions: Tensor,
    cos_sin: Tensor | None,
    interleaved: bool,
    slot_mapping: Tensor,
    kv: KV,
) -> bytes:
    tokens, q_heads, size = q.shape
    table, rotary = (0, 0) if cos_sin is None else (cos_sin.data_ptr(), 2 * cos_sin.shape[2])
    return _pack_heads(
        0,
        q.data_ptr(),
        k.data_ptr(),
        positions.data_ptr(),
        table,
        q.stride()[0],
        k.stride()[0],
        tokens,
        q_heads,
        k.shape[1],
        size,
        rotary,
        interleaved,
        DTYPES[q.dtype],
        v.data_ptr(),
        0 if q_weight is None else q_weight.data_ptr(),
        0 if k_weight is None else k_weight.data_ptr(),
        kv.address,
        slot_mapping.data_ptr(),
        v.stride()[0],
        eps,
    )


def paged_attention(
    out: Tensor,
    q: Tensor,
    kv: KV,
    query_start: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    window: int,
    soft_cap: float,
    sinks: Tensor | None = None,
) -> None:
    """Causal attention over the paged KV: q and out [T,Hq,D], int32 block_table [S,B], float32 sinks [Hq]."""
    given = (out, q, query_start, seq_lens, block_table, scale, window, soft_cap, sinks)
    last, arguments = kv.attention
    if not _same(last, given):
        _, heads, size = q.shape
        rows, columns = block_table.shape
        arguments = _pack_attention(
            0,
            out.data_ptr(),
            q.data_ptr(),
            kv.address,
            query_start.data_ptr(),
            seq_lens.data_ptr(),
            block_table.data_ptr(),
            heads * size,
            q.stride()[0],
            columns,
            rows,
            heads,
            window,
            DTYPES[q.dtype],
            scale,
            soft_cap,
            0 if sinks is None else sinks.data_ptr(),
        )
        kv.attention = (given, arguments)
    _paged_attention(arguments, *given, kv)


def encoder_attention(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, query_start: Tensor, max_query_len: int, scale: float
) -> None:
    """Bidirectional attention within each row: q and out [T,Hq,D], k and v [T,Hk,D]."""
    _, heads, size = q.shape
    pointers = out.data_ptr(), q.data_ptr(), k.data_ptr(), v.data_ptr(), query_start.data_ptr()
    strides = heads * size, q.stride()[0], k.stride()[0], v.stride()[0]
    sizes = query_start.shape[0] - 1, heads, k.shape[1], size, DTYPES[q.dtype]
    _encoder_attention(_pack_encoder(0, *pointers, *strides, *sizes, scale), out, q, k, v, query_start)
